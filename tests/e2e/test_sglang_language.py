"""The example programs, unchanged but for the import, run by SGLang's own language against our server: the same calls and text. And
its public names: ours take what theirs take.

BANYAN_CLIENTS names a folder with a virtual environment `sglang`; docs/compatibility.md says what is in it.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_frontend import EXAMPLES, PROGRAMS, Recording, example
from server import Server, running

import banyan as bn
from banyan.lang.group import Forks
from banyan.lang.program import Function
from banyan.lang.state import ProgramState

PYTHON = Path(os.environ.get("BANYAN_CLIENTS") or "/nowhere") / "sglang" / "bin" / "python"
TEMPLATE = "chatml"
# The package's __init__ wants every library of its engine; the language does not. Its requests are noted on their way out.
PACKAGE = """
import importlib.metadata, inspect, json, sys, types
from pathlib import Path
root = next(Path(path) / "sglang" for path in sys.path if (Path(path) / "sglang").is_dir())
package = types.ModuleType("sglang")
package.__path__ = [str(root)]
package.__version__ = importlib.metadata.version("sglang")
sys.modules["sglang"] = package
from sglang.lang import api
"""
RUN = """
url, template, source = sys.argv[1:]
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
SIGNATURES = """
from sglang.lang import interpreter, ir
def signature(function):
    return {each.name: str(each.default) for each in inspect.signature(function).parameters.values()}
def of(owner):
    return {name: signature(value) for name, value in vars(owner).items() if name[0] != "_" and inspect.isfunction(value)}
owners = {"api": api, "state": interpreter.ProgramState, "forks": interpreter.ProgramStateGroup, "function": ir.SglFunction}
print(json.dumps({name: of(owner) for name, owner in owners.items()}))
"""

pytestmark = [pytest.mark.nightly, pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there")
    with running("smollm2", tmp_path_factory.mktemp("s"), "--dtype", "float32", load_format="auto") as server:
        yield server


def theirs(*words: str) -> dict[str, Any]:
    command = [str(PYTHON), "-c", *words]
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
    found = theirs(PACKAGE + RUN, smollm2.url, TEMPLATE, str(EXAMPLES / f"{name}.py"))
    assert found["texts"] == texts
    assert asked(found["calls"]) == asked([call.body for call in backend.calls])
    backend.shutdown()


def misfits(expected: dict[str, str], function: Any) -> list[str]:
    """What one of their signatures has and ours does not take in the same place with the same default. Options that a run hands
    to every gen are keywords of ours."""
    ours = inspect.signature(function).parameters
    loose = {name for name, each in ours.items() if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    found = [f"no {name}" for name in expected if name not in ours and not loose]
    common = [name for name in expected if name in ours]
    if common != [name for name in ours if name in expected]:
        found.append(f"order {common}")
    same = [name for name in common if " object at " not in expected[name] and name not in loose]
    return found + [f"{name}={ours[name].default}" for name in same if str(ours[name].default) != expected[name]]


def test_every_public_name_has_their_signature() -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there")
    owners = {"api": bn, "state": ProgramState, "forks": Forks, "function": Function}
    found = {}
    for place, functions in theirs(PACKAGE + SIGNATURES).items():
        assert functions, place
        for name, expected in functions.items():
            ours = getattr(owners[place], name, None)
            wrong = ["missing"] if ours is None else misfits(expected, ours)
            if wrong:
                found[f"{place}.{name}"] = wrong
    assert found == {}
