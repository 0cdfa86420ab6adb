"""The example programs, unchanged but for the import, run by SGLang's own language against our server: the same calls and text.

BANYAN_CLIENTS names a folder with a virtual environment `sglang`; docs/compatibility.md says what is in it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_frontend import EXAMPLES, PROGRAMS, Recording, example
from server import Server, running

PYTHON = Path(os.environ.get("BANYAN_CLIENTS") or "/nowhere") / "sglang" / "bin" / "python"
TEMPLATE = "chatml"
# The package's __init__ wants every library of its engine; the language does not. Its requests are noted on their way out.
THEIRS = """
import importlib.metadata, json, sys, types
from pathlib import Path
url, template, source = sys.argv[1:]
root = next(Path(path) / "sglang" for path in sys.path if (Path(path) / "sglang").is_dir())
package = types.ModuleType("sglang")
package.__path__ = [str(root)]
package.__version__ = importlib.metadata.version("sglang")
sys.modules["sglang"] = package
from sglang.lang import api
from sglang.lang.backend import runtime_endpoint
vars(package).update({name: value for name, value in vars(api).items() if not name.startswith("_")})
calls = []
send = runtime_endpoint.http_request
def noted(url, json=None, **more):
    if url.endswith("/generate"):
        calls.append(json)
    return send(url, json=json, **more)
runtime_endpoint.http_request = noted
module = {"__name__": "example"}
exec(Path(source).read_text().replace("import banyan as sgl", "import sglang as sgl"), module)
backend = runtime_endpoint.RuntimeEndpoint(url, chat_template_name=template)
texts = []
for item in module["ITEMS"]:
    state = module["PROGRAM"].run(**item, backend=backend, temperature=0)
    texts.append(state.text())
print(json.dumps({"texts": texts, "calls": calls}))
"""

pytestmark = [pytest.mark.nightly, pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there")
    with running("smollm2", tmp_path_factory.mktemp("s"), "--dtype", "float32", load_format="auto") as server:
        yield server


def theirs(url: str, name: str) -> dict[str, Any]:
    command = [str(PYTHON), "-c", THEIRS, url, TEMPLATE, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def asked(bodies: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """(prompt, most new tokens) of every completion; what is computed for the cache's sake and scores are each language's own."""
    generating = [body for body in bodies if body["sampling_params"]["max_new_tokens"] > 0]
    return sorted((body["text"], body["sampling_params"]["max_new_tokens"]) for body in generating)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_program_gives_the_same(smollm2: Server, name: str) -> None:
    module = example(name)
    backend = Recording(smollm2.url, chat_template_name=TEMPLATE)
    texts = [module.PROGRAM.run(**item, backend=backend, temperature=0).text() for item in module.ITEMS]
    found = theirs(smollm2.url, name)
    assert found["texts"] == texts
    assert asked(found["calls"]) == asked([call.body for call in backend.calls])
    backend.shutdown()
