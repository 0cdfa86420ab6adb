"""The language over the real processes: a server and an Engine with the token oracle, and a small real model."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import CONFIG
from tiny_tokenizers import byte_level_folder

import banyan as bn
from banyan.lang.backend.base import Backend
from banyan.lang.backend.engine import EngineBackend
from banyan.lang.backend.native import NativeBackend

DEADLINE = 60.0
TEMPLATE = (
    "{% for m in messages %}{{ '<|eot_id|>' if not loop.first }}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|eot_id|>[assistant]{% endif %}"
)
RULES = "Answer in one word, and only if you are sure of it; otherwise say nothing at all. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = byte_level_folder(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with bn.Runtime(model_path=model, load_format="oracle", port=port, launch_timeout=DEADLINE) as runtime:
        yield runtime.endpoint


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Backend]:
    with bn.Engine(model_path=model, load_format="oracle") as engine:
        yield EngineBackend(engine)


@pytest.fixture(params=["server", "engine"])
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    found: NativeBackend = request.getfixturevalue(request.param)
    end = time.monotonic() + DEADLINE
    while not found.flush_cache():
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def can_score(backend: NativeBackend) -> bool:
    """Whether its /generate gives log-probabilities of a prompt."""
    try:
        backend.post({"text": "a b", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0})
    except bn.BackendError as error:
        assert "return_logprob is not supported" in str(error)
        return False
    return True


def metas(state: Any) -> list[dict[str, Any]]:
    data = state.show().json
    return [event for events in [data, *[fork for group in data["forks"] for fork in group]] for event in events["events"]]


@bn.function
def chat(s: Any, question: str) -> str:
    s += bn.system(RULES)
    s += bn.user(question)
    s += bn.assistant(bn.gen("answer", max_tokens=6, ignore_eos=True))
    s += bn.user("and again?")
    s += bn.assistant(bn.gen("again", max_tokens=4, ignore_eos=True))
    return str(s["again"])


@bn.function
def tips(s: Any, topic: str, size: int) -> None:
    s += f"{RULES}Tips on {topic}:"
    forks = s.fork(size)
    forks += lambda i: f"\ntip {i}:" + bn.gen("tip", max_tokens=5, ignore_eos=True)
    forks.join()
    s += "\nsummary:" + bn.gen("summary", max_tokens=5, ignore_eos=True)


def test_a_conversation_in_the_model_s_own_template(backend: NativeBackend) -> None:
    state = chat.run("Is it raining?", backend=backend, temperature=0)
    turns = [f"[{m['role']}]{m['content']}" for m in state.messages()]
    assert state.text() == "<|eot_id|>".join(turns)
    assert [m["role"] for m in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    first, again = state.get_meta_info("answer"), state.get_meta_info("again")
    assert first["completion_tokens"] == 6
    assert again["cached_tokens"] >= first["prompt_tokens"]


def test_both_backends_give_the_same(server: NativeBackend, engine: NativeBackend) -> None:
    states = [
        [chat.run("why?", backend=each, temperature=0), tips.run("tea", 3, backend=each, temperature=0)]
        for each in (server, engine)
    ]
    assert [state.text() for state in states[0]] == [state.text() for state in states[1]]
    assert states[0][1]["tip"] == states[1][1]["tip"]


def test_forks_reuse_what_they_share(backend: NativeBackend) -> None:
    """Without a request for the cache's sake: one fork computes what they share."""
    state = tips.run("tea", 4, backend=backend, temperature=0)
    events = metas(state)
    assert not [event for event in events if event["kind"] == "cache"]
    tip_events = sorted((event for event in events if event.get("label") == "tip"), key=lambda event: event["cached_tokens"])
    assert len(tip_events) == 4
    shared = tip_events[1]["cached_tokens"]
    assert shared > 20
    for event in tip_events[1:]:
        assert event["computed_tokens"] <= event["prompt_tokens"] - shared
    assert len(set(state["tip"])) > 1


def test_a_batch_reuses_the_prefix(backend: NativeBackend) -> None:
    states = chat.run_batch([(f"question {i}",) for i in range(8)], backend=backend, temperature=0)
    alone = [chat.run(f"question {i}", backend=backend, temperature=0) for i in range(8)]
    assert [state.text() for state in states] == [state.text() for state in alone]
    prefix = chat.cache(backend)
    assert prefix.startswith(f"[system]{RULES}<|eot_id|>[user]")
    length = backend.cache_prefix(prefix)["prompt_tokens"]  # type: ignore[index]
    cached = sorted(state.get_meta_info("answer")["cached_tokens"] for state in states)
    assert all(count >= length - 2 for count in cached[1:]), cached  # one of them computes it for all


def test_a_fork_before_any_text(backend: NativeBackend) -> None:
    @bn.function
    def program(s: Any) -> None:
        forks = s.fork(3)
        forks += lambda i: f"{i}: " + bn.gen("x", max_tokens=3, ignore_eos=True)
        forks.join("concate_and_append")

    state = program.run(backend=backend, temperature=0)
    assert [state.text().find(f"{i}: ") >= 0 for i in range(3)] == [True] * 3


def test_streams(backend: NativeBackend) -> None:
    whole = chat.run("why?", backend=backend, temperature=0)
    state = chat.run("why?", backend=backend, temperature=0, stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == whole.text()
    assert len(pieces) > 1  # how many are seen apart depends on how busy the machine is
    assert "".join(state.text_iter("again")) == whole["again"]


def test_n_and_seeds(backend: NativeBackend) -> None:
    @bn.function
    def program(s: Any) -> None:
        s += "The number is" + bn.gen("x", n=3, max_tokens=4, ignore_eos=True)

    state = program.run(backend=backend, seed=5)
    assert len(state["x"]) == 3
    assert state.text() == "The number is" + state["x"][0]
    assert program.run(backend=backend, seed=5)["x"] == state["x"]


def test_nested_batches_and_forks(backend: NativeBackend) -> None:
    """32 programs x 4 forks with 4 threads."""
    states = tips.run_batch([(f"topic {i}", 4) for i in range(32)], backend=backend, num_threads=4, temperature=0)
    assert all(len(state["tip"]) == 4 for state in states)


def test_an_async_program(backend: NativeBackend) -> None:
    @bn.function
    async def program(s: Any, question: str) -> str:
        s += bn.user(question) + bn.assistant(bn.gen("x", max_tokens=4, ignore_eos=True))
        forks = s.fork(2)
        forks += bn.user("more") + bn.assistant(bn.gen("y", max_tokens=3, ignore_eos=True))
        await forks.join()
        return f"{await s['x']}|{await s['y']}"

    async def several() -> list[Any]:
        return await program.run_batch_async([(f"q{i}",) for i in range(6)], backend=backend, temperature=0)

    states = asyncio.run(several())
    assert [state.ret_value for state in states] == [
        program.run(f"q{i}", backend=backend, temperature=0).ret_value for i in range(6)
    ]


def test_errors_name_the_step_and_harm_nothing(backend: NativeBackend) -> None:
    @bn.function
    def program(s: Any, top_p: float) -> None:
        s += "a b c" + bn.gen("x", top_p=top_p, max_tokens=3)

    with pytest.raises(bn.StepError, match=r"program, step gen 'x': .*top_p must be in \(0, 1\], got 2") as caught:
        program.run(2.0, backend=backend)
    assert caught.value.__cause__.status == 400  # type: ignore[union-attr]
    states = program.run_batch([(0.5,), (2.0,), (0.5,)], backend=backend, temperature=0)
    assert [state.error() is None for state in states] == [True, False, True]
    with pytest.raises(bn.UnsupportedError, match="does not understand images"):
        bn.function(lambda s: s.__iadd__(bn.image("http://x/y.png"))).run(backend=backend)


def test_select(backend: NativeBackend) -> None:
    """Runs in full as soon as /generate gives log-probabilities; until then the refusal has a name."""

    @bn.function
    def program(s: Any) -> None:
        s += "The quick brown fox is" + bn.select("x", [" quick", " brown", " lazy dog"])

    if not can_score(backend):
        with pytest.raises(bn.StepError, match=r"select 'x': .*return_logprob is not supported"):
            program.run(backend=backend)
        return
    state = program.run(backend=backend)
    scores = state.get_meta_info("x")["normalized_prompt_logprobs"]
    assert state["x"] == [" quick", " brown", " lazy dog"][scores.index(max(scores))]
    assert all(isinstance(score, float) for score in scores)


def test_constrained_text(backend: NativeBackend) -> None:
    """As test_select: runs in full as soon as the server constrains text."""

    @bn.function
    def program(s: Any) -> None:
        s += "The number is " + bn.gen("x", regex="[0-9]{2}", max_tokens=8) + bn.gen("y", dtype=bool, max_tokens=16)

    try:
        state = program.run(backend=backend, temperature=0)
    except bn.StepError as error:
        assert "regex is not supported" in str(error)
        return
    assert re.fullmatch("[0-9]{2}", state["x"])
    assert state["y"] in ("True", "False")


def test_the_server_s_information(backend: NativeBackend) -> None:
    info = bn.get_server_info(backend)
    assert info is not None
    assert info["status"] == "ready"
    assert bn.flush_cache(backend) is True


def test_cancelling_a_program_aborts_on_the_server(backend: NativeBackend) -> None:
    @bn.function
    def endless(s: Any) -> None:
        s += "on and on" + bn.gen("x", max_tokens=3900, ignore_eos=True)

    states = [endless.run(backend=backend, stream=True) for _ in range(3)]
    for state in states:
        pieces = state.text_iter("x")
        next(pieces)
        state.cancel()
    end = time.monotonic() + DEADLINE
    while not backend.flush_cache():  # it is refused while anything runs
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_engine_is_a_backend_by_itself(engine: EngineBackend) -> None:
    assert chat.run("x", backend=engine.engine, temperature=0).text() == chat.run("x", backend=engine, temperature=0).text()


def test_runtime_s_own_methods(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with bn.Runtime(model_path=model, load_format="oracle", port=port, launch_timeout=DEADLINE) as runtime:
        answer = json.loads(runtime.generate("a b", {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}))
        runtime.cache_prefix("a b")

        async def pieces() -> list[str]:
            return [
                piece async for piece in runtime.add_request("a b", {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True})
            ]

        assert "".join(asyncio.run(pieces())) == answer["text"]
    with pytest.raises(bn.BackendError):
        runtime.endpoint.get_server_info()
    with pytest.raises(bn.StartError, match="ended with status"):
        bn.Runtime(model_path="/no/such/model", launch_timeout=DEADLINE)


def test_a_script_needs_neither_guard_nor_torch(model: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, banyan as sgl\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "@sgl.function\n"
        "def program(s):\n"
        "    s += 'a b' + sgl.gen('x', max_tokens=3)\n"
        f"sgl.set_default_backend(sgl.Engine(model_path={model!r}, load_format='oracle'))\n"
        "print(len(program.run()['x']) > 0)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.model
def test_a_real_model_answers_and_reuses() -> None:
    with bn.Engine(model_path="smollm2") as engine:

        @bn.function
        def program(s: Any) -> None:
            s += bn.system("You answer with one word.")
            s += bn.user("What is the capital of France?")
            s += bn.assistant(bn.gen("x", max_tokens=8))
            forks = s.fork(2)
            forks += lambda i: bn.user(["Of Italy?", "Of Spain?"][i]) + bn.assistant(bn.gen("y", max_tokens=8))
            forks.join()

        state = program.run(backend=engine, temperature=0)
        assert "Paris" in state["x"]
        assert state.text().startswith("<|im_start|>system\nYou answer with one word.<|im_end|>\n<|im_start|>user\n")
        forks = [event for event in metas(state) if event.get("label") == "y"]
        known = state.get_meta_info("x")["prompt_tokens"]
        assert all(event["cached_tokens"] >= known for event in forks)
        backend = EngineBackend(engine)
        if can_score(backend):
            chooser = bn.function(lambda s: s.__iadd__("The capital of France is" + bn.select("c", [" Rome", " Paris", " Madrid"])))
            assert chooser.run(backend=backend)["c"] == " Paris"
