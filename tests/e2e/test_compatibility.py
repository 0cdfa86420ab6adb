"""Clients and gateways of others against the real server. BANYAN_CLIENTS names a folder with a virtual environment for each;
docs/compatibility.md says what is in them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import Server, until

import banyan as bn

CLIENTS = Path(os.environ.get("BANYAN_CLIENTS") or "/nowhere")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
PROMPT = "the quick brown fox jumps over the lazy dog " * 4
# The package's __init__ wants every library of its engine; the load generator does not.
LOAD_GENERATOR = """
import runpy, sys, types
from pathlib import Path
package = types.ModuleType("sglang")
package.__path__ = [str(next(Path(path) / "sglang" for path in sys.path if (Path(path) / "sglang").is_dir()))]
package.__version__ = "0"
unused = types.ModuleType("sglang.srt.disaggregation.utils")
unused.FAKE_BOOTSTRAP_HOST = ""
sys.modules |= {"sglang": package, unused.__name__: unused}
runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
"""
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""

# Asks in every way that programs ask through LiteLLM, and tells what came.
LITELLM = """
import asyncio, json, sys
import litellm
litellm.suppress_debug_info = True
url, name = sys.argv[1:]
shared = {"api_base": url + "/v1", "api_key": "key", "max_retries": 0, "temperature": 0, "max_tokens": 8}
chat = {"model": "openai/" + name, "messages": [{"role": "user", "content": "hello there"}], **shared}
text = {"model": "text-completion-openai/" + name, "prompt": "the quick brown", **shared}

def joined(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

async def several():
    answers = await asyncio.gather(*[litellm.acompletion(**chat) for _ in range(4)])
    return [answer.choices[0].message.content for answer in answers]

def refused(**more):
    try:
        litellm.completion(**{**chat, **more})
    except Exception as error:
        return type(error).__name__, getattr(error, "status_code", None)

whole = litellm.completion(**chat)
chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
told = {
    "chat": whole.choices[0].message.content,
    "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    "stream": joined(chunks),
    "stream_usage": [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)][-1],
    "async": asyncio.run(several()),
    "choices": len(litellm.completion(**chat, n=3).choices),
    "logprobs": len(litellm.completion(**chat, logprobs=True, top_logprobs=2).choices[0].logprobs.content),
    "text": litellm.text_completion(**text).choices[0].text,
    "extra": litellm.completion(**{**chat, "extra_body": {"regex": "(yes|no)"}}).choices[0].message.content,
    "schema": litellm.completion(**chat, response_format=schema).choices[0].message.content,
    "bad": refused(extra_body={"top_k": -7}),
    "long": refused(messages=[{"role": "user", "content": "a b c " * 5000}]),
    "unknown": refused(model="openai/" + name + "/no"),
}
print(json.dumps(told))
"""

pytestmark = pytest.mark.nightly


def program(environment: str, name: str) -> str:
    path = CLIENTS / environment / "bin" / name
    if not path.exists():
        pytest.skip(f"BANYAN_CLIENTS has no {environment}/bin/{name}")
    return str(path)


def run(*command: str, folder: Path) -> str:
    """What a program that must succeed wrote."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, **OFFLINE}, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture
def workers(start: Callable[..., Server]) -> Iterator[list[Server]]:
    servers = [start("--served-model-name", "tiny") for _ in range(2)]
    for server in servers:
        server.wait_ready()
    yield servers
    for server in servers:
        assert "Traceback" not in server.text()
        server.terminate()


@pytest.fixture
def tokenizer(model: str, tmp_path: Path) -> str:
    """The model's tokenizer in a form that every version of transformers reads."""
    folder = Path(shutil.copytree(model, tmp_path / "tokenizer"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["eos_token"] = config["eos_token"]["content"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai"])
def test_load_generator(workers: list[Server], tokenizer: str, tmp_path: Path, backend: str) -> None:
    python, port = program("sglang", "python"), str(workers[0].port)
    sizes = ["--num-prompts", "40", "--random-input-len", "64", "--random-output-len", "16"]
    where = ["--host", "127.0.0.1", "--port", port, "--tokenizer", tokenizer, "--dataset-name", "random-ids", "--model", "tiny"]
    output = ["--output-file", "out.jsonl", "--flush-cache"]
    run(python, "-c", LOAD_GENERATOR, "--backend", backend, *where, *sizes, *output, folder=tmp_path)
    assert json.loads((tmp_path / "out.jsonl").read_text())["completed"] == 40


@contextmanager
def gateway(command: list[str], folder: Path) -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    options = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    with (folder / "gateway.log").open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: _generates(client))
            yield client
    finally:
        process.kill()
        process.wait()


def _generates(client: httpx.Client) -> bool:
    try:
        return client.post("/generate", json=_body("are you there")).status_code == 200
    except httpx.TransportError:
        return False


def _body(text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}, **more}


@pytest.mark.parametrize("name", ["sglang-router", "smg"])
def test_gateways_route_prefixes_to_their_worker(workers: list[Server], tmp_path: Path, name: str) -> None:
    urls = [server.url for server in workers]
    with gateway([program(name, name), "launch", "--worker-urls", *urls], tmp_path) as client:
        expected = workers[0].generate(**_body(PROMPT))["text"]
        assert client.post("/flush_cache").json()["status"] == "success"
        answers = [client.post("/generate", json=_body(PROMPT)).json() for _ in range(6)]
        assert {answer["text"] for answer in answers} == {expected}
        assert all(answer["meta_info"]["cached_tokens"] for answer in answers[1:])
        completion = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        assert client.post("/v1/completions", json=completion).json()["choices"][0]["text"] == expected
        streamed = client.post("/v1/completions", json={**completion, "stream": True}).text
        assert streamed.rstrip().endswith("data: [DONE]")
        assert client.post("/generate", json={"text": "a", "sampling_params": {"top_p": 2}}).status_code == 400
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


@pytest.mark.timeout(700)
def test_evaluation_harness(workers: list[Server], tokenizer: str, tmp_path: Path) -> None:
    """Choices scored through echoed log-probabilities."""
    harness, data = program("lm-eval", "lm_eval"), tmp_path / "data.jsonl"
    rows = [{"question": f"The sum of {i} and one is", "choices": [f" {i}", f" {i + 1}"], "answer": 1} for i in range(12)]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "choices.yaml").write_text(TASK.replace("FILE", str(data)))
    where = f"model=tiny,base_url={workers[0].url}/v1/completions,tokenizer={tokenizer},num_concurrent=4,max_length=1000"
    told = run(
        *(harness, "--model", "local-completions", "--model_args", where, "--include_path", str(tmp_path), "--tasks", "choices"),
        folder=tmp_path,
    )
    assert "|choices|" in told


@pytest.mark.timeout(700)
def test_guidellm(workers: list[Server], tokenizer: str, tmp_path: Path) -> None:
    backend = f"kind=openai_http,target={workers[0].url},model=tiny,request_format=/v1/completions"
    told = run(
        *(program("guidellm", "guidellm"), "run", "--backend", backend),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=20"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}", "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        folder=tmp_path,
    )
    assert "successful=20 errored=0" in told, told[-3000:]


@pytest.mark.timeout(700)
def test_litellm(start: Callable[..., Server], tmp_path: Path) -> None:
    """What it asks for comes as through our language's OpenAI backend, and errors are the exceptions that they should be."""
    python = program("litellm", "python")
    (tmp_path / "chat.jinja").write_text(CHAT)
    server = start("--served-model-name", "tiny", "--chat-template", str(tmp_path / "chat.jinja"), "--context-length", "1024")
    server.wait_ready()
    lines = run(python, "-c", LITELLM, server.url, "tiny", folder=tmp_path).splitlines()
    (told,) = [json.loads(line) for line in lines if line.startswith("{")]
    asked: Any = {"base_url": f"{server.url}/v1", "api_key": "key", "dialect": "sglang"}
    chat, text = bn.OpenAI("tiny", **asked), bn.OpenAI("tiny", is_chat_model=False, **asked)

    @bn.function
    def talk(s: Any) -> None:
        s += bn.user("hello there")
        s += bn.assistant(bn.gen("answer", max_tokens=8))

    @bn.function
    def go_on(s: Any) -> None:
        s += "the quick brown" + bn.gen("answer", max_tokens=8)

    expected = talk.run(backend=chat, temperature=0)["answer"]
    assert {told["chat"], told["stream"], *told["async"]} == {expected}
    assert told["text"] == go_on.run(backend=text, temperature=0)["answer"]
    assert told["usage"][1] == told["stream_usage"] == told["logprobs"]
    assert told["choices"] == 3
    assert told["extra"] in ("yes", "no")
    assert told["schema"] in ('"a"', '"b"')
    assert told["bad"] == ["BadRequestError", 400]
    assert told["long"] == ["ContextWindowExceededError", 400]
    assert told["unknown"] == ["NotFoundError", 404]
    server.terminate()
