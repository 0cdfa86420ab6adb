"""Engine over the real processes and the token oracle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from harness import CONFIG, EOS, SCRIPT

from banyan import Engine, EngineDeadError, RequestError, StartError
from banyan.managers.ipc import IpcNames

DEADLINE = 30.0
LONG = {"max_new_tokens": 3900, "ignore_eos": True, "temperature": 0}
FOUR = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


def start(model: str, **options: Any) -> Engine:
    return Engine(model_path=model, load_format="oracle", max_running_requests=2, **options)


@pytest.fixture(scope="module")
def shared(model: str) -> Iterator[Engine]:
    with start(model) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The module's engine; every test must leave it idle, with all slots free or cached."""
    yield shared
    assert until(lambda: idle(shared)), shared.get_server_info()["internal_states"]
    assert until(lambda: shared.tokenizer_manager.num_live == 0)  # the last outputs may be on their way


def idle(engine: Engine) -> bool:
    state = engine.get_server_info()["internal_states"][0]
    return bool(state["num_running_reqs"] == state["num_waiting_reqs"] == state["num_used_tokens"] == 0)


def aborted(engine: Engine) -> int:
    return int(engine.get_server_info()["internal_states"][0]["num_aborted"])


def until(condition: Callable[[], Any]) -> bool:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def was_aborted(answer: Any) -> bool:
    return bool(answer["meta_info"]["finish_reason"]["type"] == "abort")


# --- answers ----------------------------------------------------------------------------------------------------------------------


def test_a_script_comes_back(engine: Engine) -> None:
    ids = [40, 41, 42]
    answer = engine.generate(input_ids=[SCRIPT, len(ids), *ids], return_prompt_token_ids=True)
    assert isinstance(answer, dict)
    assert answer["output_ids"] == [*ids, EOS]
    assert answer["text"]
    assert answer["prompt_token_ids"] == [SCRIPT, 3, *ids]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


@pytest.mark.parametrize(
    ("prompt", "n", "length"),
    [("hello", 1, None), ("hello", 2, 2), (["hello"], 1, 1), (["hello", "you"], 1, 2), (["a", "b"], 3, 6)],
)
def test_shape_table(engine: Engine, prompt: Any, n: int, length: int | None) -> None:
    answer = engine.generate(prompt, {**FOUR, "n": n})
    if length is None:
        assert isinstance(answer, dict)
        return
    assert isinstance(answer, list)
    assert len(answer) == length
    single = [engine.generate(text, FOUR) for text in ([prompt] if isinstance(prompt, str) else prompt)]
    assert [item["output_ids"] for item in answer] == [item["output_ids"] for item in single for _ in range(n)]


def test_a_stream_is_the_answer_bit_by_bit(engine: Engine) -> None:
    whole = engine.generate("hello", FOUR)
    assert isinstance(whole, dict)
    chunks = list(engine.generate("hello", FOUR, stream=True))
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert all(chunks[-1]["text"].startswith(chunk["text"]) for chunk in chunks)
    deltas = list(engine.generate("hello", FOUR, stream=True, incremental=True))
    assert "".join(chunk["text"] for chunk in deltas) == whole["text"]
    assert [id for chunk in deltas for id in chunk["output_ids"]] == whole["output_ids"]


def test_arrays_and_positional_arguments(engine: Engine) -> None:
    expected = engine.generate(None, FOUR, [5, 6, 7])
    assert isinstance(expected, dict)
    answer = engine.generate(None, FOUR, np.array([5, 6, 7]))
    assert isinstance(answer, dict)
    assert answer["output_ids"] == expected["output_ids"]
    unset = [None, None, None, None, None, False, None, None, None, None, None, False, False, False, 0]
    chunks = list(engine.generate(None, FOUR, [5, 6, 7], *unset, True))
    assert chunks[-1]["output_ids"] == expected["output_ids"]


def test_logprobs(engine: Engine) -> None:
    answer = engine.generate(None, FOUR, [5, 6, 7], return_logprob=True, logprob_start_len=1, top_logprobs_num=2)
    assert isinstance(answer, dict)
    meta = answer["meta_info"]
    assert [id for _, id, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [id for _, id, _ in meta["input_token_logprobs"]] == [6, 7]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 4


def test_wrong_arguments(engine: Engine) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'streem'"):
        engine.generate("a", streem=True)
    with pytest.raises(RequestError, match="started without --return-hidden-states-mode"):
        engine.generate("a", return_hidden_states=True)
    with pytest.raises(ValueError, match="Exactly one"):
        engine.generate()
    with pytest.raises(ValueError, match=r"longer than the model's context length \(4096 tokens\)"):
        engine.generate(input_ids=[1] * 5000)
    with pytest.raises(ValueError, match="top_p"):
        engine.generate("a", {"top_p": 2}, stream=True)
    with pytest.raises(TypeError, match="unknown option 'model_pth'"):
        Engine(model_pth="x")


def test_information(engine: Engine) -> None:
    info = engine.get_server_info()
    assert info["scheduler_info"]["model"]["context_len"] == 4096
    assert info["log_level"] == "error"
    assert engine.get_model_info()["vocab_size"] == CONFIG["vocab_size"]


def test_flush_cache(engine: Engine) -> None:
    prompt = list(range(3, 60))
    hits = []
    for flush in (True, False, True):
        if flush:
            assert engine.flush_cache(timeout=DEADLINE).success
        answer = engine.generate(input_ids=prompt, sampling_params=FOUR)
        assert isinstance(answer, dict)
        hits.append(answer["meta_info"]["cached_tokens"])
    assert hits == [0, len(prompt) - 1, 0]
    stream = engine.generate("a", LONG, stream=True)
    assert isinstance(stream, Iterator)
    next(stream)
    assert not engine.flush_cache().success
    engine.abort_request(abort_all=True)


# --- aborts -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "drop", "drop before the first chunk"])
def test_a_stream_that_is_left_makes_room(engine: Engine, how: str) -> None:
    """All slots of the running batch are taken by streams; when they are left, another request is served."""
    before = aborted(engine)
    streams: list[Any] = [engine.generate("a", LONG, stream=True) for _ in range(2)]
    if how != "drop before the first chunk":
        for stream in streams:
            next(stream)
            next(stream)
    if how == "close":
        for stream in streams:
            stream.close()
            stream.close()
            assert list(stream) == []
    del streams
    stream = None
    gc.collect()
    answer = engine.generate("b", FOUR)
    assert isinstance(answer, dict)
    assert answer["meta_info"]["completion_tokens"] == 4
    assert until(lambda: aborted(engine) == before + 2)


def test_abort_by_rid(engine: Engine) -> None:
    answers: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda rid=rid, n=n: answers.update({rid: engine.generate("a", {**LONG, "n": n}, rid=rid)}))
        for rid, n in (("req-1", 1), ("req-10", 1), ("many", 2))
    ]
    for thread in threads:
        thread.start()
    assert until(lambda: engine.tokenizer_manager.num_live == 4)
    with pytest.raises(RequestError, match="in use"):
        engine.generate("a", FOUR, rid="req-1")
    with pytest.raises(RequestError, match="rid must not be empty"):
        engine.abort_request()
    assert engine.abort_request("nothing") == engine.abort_request("req") == 0
    assert engine.abort_request("req-1") == 1
    assert engine.abort_request("many") == 2
    threads[0].join(DEADLINE)
    threads[2].join(DEADLINE)
    assert was_aborted(answers["req-1"])
    assert [was_aborted(answer) for answer in answers["many"]] == [True, True]
    assert "req-10" not in answers
    assert engine.abort_request(abort_all=True) == 1
    threads[1].join(DEADLINE)
    assert was_aborted(answers["req-10"])


def test_ctrl_c_aborts(engine: Engine, request: pytest.FixtureRequest) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    before = aborted(engine)
    main = threading.get_ident()

    def interrupt() -> None:
        until(lambda: engine.tokenizer_manager.num_live)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate("a", LONG)
    thread.join()
    assert until(lambda: aborted(engine) == before + 1)


def test_asyncio(engine: Engine) -> None:
    """Under the user's loop: many at once, a stream, a blocking call in a coroutine, a cancelled request, a cancelled stream."""
    before = aborted(engine)

    async def body() -> None:
        answers = await asyncio.gather(*[engine.async_generate(f"prompt {index}", FOUR) for index in range(8)])
        assert all(isinstance(answer, dict) for answer in answers)
        stream = await engine.async_generate("hello", FOUR, stream=True)
        chunks = [chunk async for chunk in stream]
        blocking = engine.generate("hello", FOUR)
        assert isinstance(blocking, dict)
        assert chunks[-1]["output_ids"] == blocking["output_ids"]
        task = asyncio.create_task(engine.async_generate("a", LONG))
        stream = await engine.async_generate("b", LONG, stream=True)
        reader = asyncio.create_task(drain(stream))
        await asyncio.sleep(0.05)
        for waiter in (task, reader):
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter

    async def drain(stream: Any) -> None:
        async for _ in stream:
            pass

    asyncio.run(body())
    assert until(lambda: aborted(engine) == before + 2)


def test_a_storm_of_aborts_leaves_the_pool_balanced(engine: Engine) -> None:
    expected = engine.generate("the same", FOUR)
    draw = random.Random(1)

    async def one(index: int) -> None:
        params = {"max_new_tokens": draw.randint(1, 60), "temperature": 0, "ignore_eos": True}
        request = engine.async_generate(f"the quick brown fox {index % 5}", params, rid=f"s-{index}")
        if index % 5:
            await request
            return
        task = asyncio.create_task(request)
        await asyncio.sleep(draw.random() * 0.2)
        if index % 2:
            task.cancel()
        else:
            engine.abort_request(f"s-{index}")
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def storm() -> None:
        await asyncio.gather(*[one(index) for index in range(100)])

    asyncio.run(storm())
    again = engine.generate("the same", FOUR)
    assert isinstance(expected, dict)
    assert isinstance(again, dict)
    assert again["output_ids"] == expected["output_ids"]


# --- life -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process, thread, descriptor or socket directory is left by a test."""
    gc.collect()
    before = (own_children(), threading.active_count(), len(os.listdir("/proc/self/fd")))
    yield
    gc.collect()
    assert (own_children(), threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def own_children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.usefixtures("nothing_left")
def test_two_engines_one_of_them_in_a_thread(model: str, shared: Engine) -> None:
    answers: list[Any] = []

    def work() -> None:
        with start(model) as other:
            answers.append(other.generate("hello", FOUR))
            answers.append(other._launched.ipc.directory)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(2 * DEADLINE)
    answer, directory = answers
    mine = shared.generate("hello", FOUR)
    assert isinstance(mine, dict)
    assert answer["output_ids"] == mine["output_ids"]
    assert not os.path.exists(directory)


@pytest.mark.usefixtures("nothing_left")
def test_shutdown_ends_what_is_under_way_and_is_idempotent(model: str) -> None:
    engine = start(model)
    stream = engine.generate("a", LONG, stream=True)
    assert isinstance(stream, Iterator)
    next(stream)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            engine.generate("b", LONG)
        except EngineDeadError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert until(lambda: engine.tokenizer_manager.num_live == 2)
    pids = engine._launched.group.pids()
    engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    engine.shutdown()
    thread.join(DEADLINE)
    assert [str(error) for error in errors] == ["the engine was shut down"]
    for call in (
        lambda: engine.generate("a"),
        engine.flush_cache,
        lambda: next(stream),
        lambda: asyncio.run(engine.async_generate("a")),
    ):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_told_to_every_caller(model: str, victim: int) -> None:
    with start(model, restart_budget=0) as engine:
        pids = engine._launched.group.pids()
        name = ("scheduler", "detokenizer")[victim]
        killed: list[float] = []

        def kill() -> None:
            until(lambda: engine.tokenizer_manager.num_live)
            os.kill(pids[victim], signal.SIGKILL)
            killed.append(time.monotonic())

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(EngineDeadError, match=f"the {name} process died: killed by SIGKILL"):
            engine.generate("a", {**LONG, "stop": ["never"]})
        thread.join()
        with pytest.raises(EngineDeadError, match=name):
            engine.generate("a", FOUR)
        assert not engine.tokenizer_manager.health().alive


@pytest.mark.usefixtures("nothing_left")
def test_a_failed_start_says_why_and_leaves_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[IpcNames] = []
    create = IpcNames.create

    def spy() -> IpcNames:
        made.append(create())
        return made[-1]

    monkeypatch.setattr(IpcNames, "create", spy)
    monkeypatch.setenv("BANYAN_FAULTS", "load_fail=1")
    with pytest.raises(StartError, match="the scheduler failed to start: RuntimeError: BANYAN_FAULTS: load_fail") as caught:
        start(model)
    assert "Traceback" in caught.value.detail
    assert [os.path.exists(names.directory) for names in made] == [False]
    with pytest.raises(StartError, match="does not exist"):
        start(model + "/nowhere")


SCRIPTS = {
    # no __main__ guard, no shutdown
    "forgetful": "print(engine.generate('hi', P)['meta_info']['completion_tokens'], *pids, flush=True)",
    # a forked process that exits normally must not take the engine along
    "forking": """
import os
if not (pid := os.fork()):
    sys.exit(0)
os.waitpid(pid, 0)
print(engine.generate('hi', P)['meta_info']['completion_tokens'], *pids, flush=True)
""",
    "failing": "print(4, *pids, flush=True)\nraise SystemExit(7)",
    "streaming": """
stream = engine.generate('hi', {**P, 'max_new_tokens': 3000}, stream=True)
next(stream)
print(4, *pids, flush=True)
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_that_end_without_shutdown(model: str, tmp_path: Path, name: str) -> None:
    head = f"""
import sys
from banyan import Engine
P = {FOUR!r}
engine = Engine(model_path={model!r}, load_format="oracle")
pids = engine._launched.group.pids()
assert "torch" not in sys.modules
"""
    script = tmp_path / "random.py"  # named as a module of the standard library, in the working directory
    script.write_text(head + SCRIPTS[name])
    result = subprocess.run(
        [sys.executable, "-P", "-W", "ignore::DeprecationWarning", "random.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )
    assert (result.returncode, result.stderr) == (7 if name == "failing" else 0, "")
    tokens, *pids = map(int, result.stdout.split())
    assert tokens == 4
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_continuations_are_a_batch_that_shares_its_prompt(engine: Engine) -> None:
    assert engine.flush_cache(DEADLINE).success
    ids = list(range(3, 60))
    answers = engine.generate(
        input_ids=ids, continuations=[[70], [71, 72], [73]], sampling_params=FOUR, return_prompt_token_ids=True
    )
    assert [answer["prompt_token_ids"] for answer in answers] == [[*ids, 70], [*ids, 71, 72], [*ids, 73]]
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 57, 57], "the first computes what all share"
    alone = engine.generate(input_ids=[[*ids, 70], [*ids, 71, 72], [*ids, 73]], sampling_params=FOUR)
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in alone]
    texts = engine.generate("ab", FOUR, continuations=["c", "d"], return_prompt_token_ids=True)
    both = engine.generate(["abc", "abd"], FOUR, return_prompt_token_ids=True)
    assert [answer["prompt_token_ids"] for answer in texts] == [answer["prompt_token_ids"] for answer in both]
    for wrong in ({"continuations": []}, {"continuations": [[1]]}, {"continuations": [7]}):
        with pytest.raises(RequestError, match="continuations"):
            engine.generate("ab", FOUR, **wrong)


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_continuations_compute_no_last_token(engine: Engine, stream: bool) -> None:
    """The values are those of each whole text alone."""
    assert engine.flush_cache(DEADLINE).success
    ids, own = list(range(3, 60)), [[70], [71, 72, 73], [74], [71, 72, 75], [71]]
    asked: dict[str, Any] = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    got: Any = engine.generate(input_ids=ids, continuations=own, stream=stream, **asked)
    answers = sorted(got, key=lambda item: item["index"]) if stream else got
    plain = engine.generate(input_ids=[[*ids, *tokens] for tokens in own], logprob_start_len=len(ids), **asked)
    metas = [answer["meta_info"] for answer in answers]
    assert [meta["input_token_logprobs"] for meta in metas] == [item["meta_info"]["input_token_logprobs"] for item in plain]
    assert [len(meta["input_token_logprobs"]) for meta in metas] == [1, 3, 1, 3, 1]
    assert sum(meta["prompt_tokens"] - meta["cached_tokens"] for meta in metas) == len(ids) + 2
    again = engine.generate(input_ids=ids, continuations=[[80], [81]], **asked)
    assert sum(item["meta_info"]["prompt_tokens"] - item["meta_info"]["cached_tokens"] for item in again) == 1
