"""Sessions over the real processes and the token oracle, through Engine and over HTTP."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from harness import CONFIG, prompt_of
from tiny_tokenizers import byte_level_folder

from banyan import Engine, RequestError

DEADLINE = 30.0
SIX = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
LONG = {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True}
ENDLESS = {**LONG, "max_new_tokens": 100_000}  # longer than any client needs to ask and leave
CAPACITY = 100_000
Params = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = byte_level_folder(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(scope="module", params=[(1, True), (16, False), (1, False), (16, True)], ids=lambda p: f"page{p[0]}-overlap{p[1]}")
def running(model: str, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, int]]:
    page_size, overlap = request.param
    options: dict[str, Any] = {"page_size": page_size, "disable_overlap_schedule": not overlap, "strict": True}
    with Engine(model_path=model, load_format="oracle", max_running_requests=4, max_total_tokens=16384, **options) as engine:
        yield engine, page_size


@pytest.fixture
def engine(running: tuple[Engine, int]) -> Iterator[Engine]:
    """Every test must leave it idle and close its sessions."""
    yield running[0]
    assert until(lambda: state(running[0])["num_running_reqs"] == state(running[0])["num_used_tokens"] == 0), state(running[0])


@pytest.fixture
def page_size(running: tuple[Engine, int]) -> int:
    return running[1]


def state(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return found


def until(condition: Callable[[], Any]) -> bool:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def ask(engine: Engine, ids: list[int], params: Params | None = None, **session: Any) -> dict[str, Any]:
    answer = engine.generate(
        input_ids=ids, sampling_params=params or SIX, session_params=session or None, return_prompt_token_ids=True
    )
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("streaming", [False, True])
def test_a_conversation_equals_its_prompts_sent_whole(engine: Engine, page_size: int, streaming: bool) -> None:
    assert engine.flush_cache(DEADLINE).success
    session = engine.open_session(CAPACITY, streaming=streaming)
    context: list[int] = []
    rid = None
    for number in range(5):
        before, new = len(context), prompt_of(number + 10 * streaming, 37)
        context = context + new
        answer = ask(engine, new, id=session, rid=rid)
        assert answer["prompt_token_ids"] == context
        assert answer["meta_info"]["prompt_tokens"] == len(context)
        assert answer["meta_info"]["cached_tokens"] == max(before - 1, 0) // page_size * page_size
        assert answer["output_ids"] == ask(engine, context)["output_ids"]
        context += answer["output_ids"]
        rid = answer["meta_info"]["id"]
    engine.close_session(session)


def test_text_and_streams(engine: Engine) -> None:
    session = engine.open_session(CAPACITY)
    first = engine.generate("hello", SIX, session_params={"id": session}, return_prompt_token_ids=True)
    assert isinstance(first, dict)
    rid = first["meta_info"]["id"]
    chunks = list(
        engine.generate(" you", SIX, session_params={"id": session, "rid": rid}, stream=True, return_prompt_token_ids=True)
    )
    assert chunks[-1]["prompt_token_ids"][: len(first["prompt_token_ids"]) + 6] == first["prompt_token_ids"] + first["output_ids"]
    assert chunks[-1]["output_ids"] == ask(engine, chunks[-1]["prompt_token_ids"])["output_ids"]
    third = ask(engine, [9], id=session, rid=chunks[-1]["meta_info"]["id"])
    assert third["prompt_token_ids"] == chunks[-1]["prompt_token_ids"] + chunks[-1]["output_ids"] + [9]
    engine.close_session(session)


def test_a_bos_amid_the_conversation_is_removed(engine: Engine) -> None:
    session = engine.open_session(CAPACITY)
    bos = CONFIG["bos_token_id"]
    first = ask(engine, [bos, 5], id=session)
    assert first["prompt_token_ids"] == [bos, 5]
    second = ask(engine, [bos, 6], id=session, rid=first["meta_info"]["id"])
    assert second["prompt_token_ids"] == [bos, 5, *first["output_ids"], 6]
    engine.close_session(session)


def test_branches(engine: Engine) -> None:
    session = engine.open_session(CAPACITY)
    root = ask(engine, [5, 6, 7], id=session)
    name, history = root["meta_info"]["id"], [5, 6, 7, *root["output_ids"]]
    left = ask(engine, [8], id=session, rid=name)
    right = ask(engine, [9], id=session, rid=name)
    assert (left["prompt_token_ids"], right["prompt_token_ids"]) == ([*history, 8], [*history, 9])
    assert ask(engine, [9], id=session, rid=name, drop_previous_output=True)["prompt_token_ids"] == [5, 6, 7, 9]
    assert ask(engine, [9], id=session, rid=name, offset=2)["prompt_token_ids"] == [5, 6, 9]
    assert ask(engine, [9], id=session, rid=name, offset=-1)["prompt_token_ids"] == [*history[:-1], 9]
    again = ask(engine, [3], id=session, rid=name, replace=True)
    assert again["prompt_token_ids"] == [*history, 3]
    with pytest.raises(RequestError, match="does not exist in session"):
        ask(engine, [4], id=session, rid=left["meta_info"]["id"])
    assert ask(engine, [4], id=session, replace=True)["prompt_token_ids"] == [4]
    with pytest.raises(RequestError, match="does not exist in session"):
        ask(engine, [4], id=session, rid=again["meta_info"]["id"])
    engine.close_session(session)


def test_replace_aborts_what_runs(engine: Engine) -> None:
    session = engine.open_session(CAPACITY)
    root = ask(engine, [5, 6, 7], id=session)["meta_info"]["id"]
    stream = engine.generate(input_ids=[8], sampling_params=LONG, session_params={"id": session, "rid": root}, stream=True)
    assert isinstance(stream, Iterator)
    next(stream)
    assert ask(engine, [9], id=session, rid=root, replace=True)["meta_info"]["finish_reason"]["type"] == "length"
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    engine.close_session(session)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_turn_that_is_aborted_and_then_continued(engine: Engine, streaming: bool) -> None:
    session = engine.open_session(CAPACITY, streaming=streaming)
    first = ask(engine, [5, 6, 7], id=session)
    history = [5, 6, 7, *first["output_ids"]]
    stream = engine.generate(
        input_ids=[8], sampling_params=LONG, session_params={"id": session, "rid": first["meta_info"]["id"]}, stream=True
    )
    assert isinstance(stream, Iterator)
    rid = next(stream)["meta_info"]["id"]
    with pytest.raises(RequestError, match=r"has a turn under way|has not finished"):
        ask(engine, [9], id=session, rid=rid)
    engine.abort_request(rid)
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) < LONG["max_new_tokens"]
    if streaming:  # the turn is as if it had never been
        expected = [*history, 9]
        answer = ask(engine, [9], id=session)
    else:  # it stays, with what it produced
        expected = [*history, 8, *last["output_ids"], 9]
        answer = ask(engine, [9], id=session, rid=rid)
    assert answer["prompt_token_ids"] == expected
    assert answer["output_ids"] == ask(engine, expected)["output_ids"]
    engine.close_session(session)


def test_what_is_refused(engine: Engine) -> None:
    assert engine.open_session(CAPACITY, "mine") == "mine"
    for wrong, text in (
        ({"id": "no"}, "Invalid request: session id no does not exist"),
        ({"id": "mine", "rid": "x"}, "Invalid request: rid x does not exist in session mine"),
        ({"id": "mine", "offset": "1"}, "offset"),
        ({"rid": "x"}, "id"),
    ):
        with pytest.raises(RequestError, match=text):
            ask(engine, [1], **wrong)
    with pytest.raises(RequestError, match="exists already"):
        engine.open_session(CAPACITY, "mine")
    with pytest.raises(RequestError, match="cannot be used together"):
        engine.generate(input_ids=[1], session_params={"id": "mine"}, session_id="x")
    for more in ({"input_ids": [[1], [2]]}, {"input_ids": [1], "sampling_params": {"n": 2}}, {"prompt": ["a"]}):
        with pytest.raises(RequestError, match="one prompt with n = 1"):
            engine.generate(**more, session_params={"id": "mine"})
    with pytest.raises(RequestError, match="longer than"):
        ask(engine, [5] * 5000, id="mine")
    engine.close_session("mine")
    for _ in range(2):
        with pytest.raises(RequestError, match="session id mine does not exist"):
            engine.close_session("mine")


def test_capacity(engine: Engine) -> None:
    session = engine.open_session(20)
    first = ask(engine, [5] * 10, id=session)["meta_info"]["id"]
    with pytest.raises(RequestError, match="its capacity is 20"):
        ask(engine, [5] * 5, id=session, rid=first)
    assert ask(engine, [5] * 4, id=session, rid=first)["meta_info"]["prompt_tokens"] == 20
    engine.close_session(session)


def test_a_busy_session_closes_with_its_turn(engine: Engine) -> None:
    session = engine.open_session(CAPACITY, streaming=True)
    turn = {**LONG, "max_new_tokens": 400}
    stream = engine.generate(input_ids=[5] * 40, sampling_params=turn, session_params={"id": session}, stream=True)
    assert isinstance(stream, Iterator)
    next(stream)
    engine.close_session(session)
    with pytest.raises(RequestError, match="does not exist"):
        ask(engine, [1], id=session)
    assert list(stream)[-1]["meta_info"]["completion_tokens"] == 400
    assert until(lambda: state(engine)["num_session_held_tokens"] == 0)


def test_sessions_time_out(engine: Engine) -> None:
    session = engine.open_session(CAPACITY, streaming=True, timeout=0.3)
    ask(engine, [5] * 40, id=session)
    assert until(lambda: state(engine)["num_session_held_tokens"] == 0)
    with pytest.raises(RequestError, match="does not exist"):
        ask(engine, [1], id=session)


def test_streaming_sessions_hold_their_kv(engine: Engine, page_size: int) -> None:
    """Prompts that fill the pool several times over push ordinary prefixes out, not what a session holds."""
    session = engine.open_session(CAPACITY, streaming=True)
    mine, plain = prompt_of(70, 300), prompt_of(71, 300)
    ask(engine, mine, id=session)
    ask(engine, plain)
    held = 305 // page_size * page_size
    assert state(engine)["num_session_held_tokens"] == held
    for seed in range(10):
        ask(engine, prompt_of(100 + seed, 3900))
    assert ask(engine, plain)["meta_info"]["cached_tokens"] == 0
    assert ask(engine, [7], id=session)["meta_info"]["cached_tokens"] == held
    with pytest.raises(RequestError, match="allows no replace, offset or drop_previous_output"):
        ask(engine, [7], id=session, replace=True)
    reply = engine.flush_cache(DEADLINE)
    assert reply.success
    assert reply.message == "Cache flushed; 1 sessions lost what they held."
    answer = ask(engine, [8], id=session)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["prompt_token_ids"][:300] == mine
    engine.close_session(session)


def test_what_the_options_do(model: str) -> None:
    with Engine(model_path=model, load_format="oracle", disable_radix_cache=True, max_sessions=2) as engine:
        with pytest.raises(RequestError, match="--disable-radix-cache"):
            engine.open_session(CAPACITY, streaming=True)
        session = engine.open_session(CAPACITY)
        first = ask(engine, [5, 6], id=session)
        assert ask(engine, [7], id=session, rid=first["meta_info"]["id"])["prompt_token_ids"] == [5, 6, *first["output_ids"], 7]
        engine.open_session(CAPACITY)
        with pytest.raises(RequestError, match="--max-sessions") as caught:
            engine.open_session(CAPACITY)
        assert caught.value.status_code == 429


def test_many_sessions_at_once(engine: Engine) -> None:
    """Concurrent conversations, some streaming, mixed with each other: each is as if it were alone."""
    sessions = [engine.open_session(CAPACITY, streaming=bool(i % 2)) for i in range(6)]
    contexts: dict[str, list[int]] = {}

    def talk(index: int, session: str) -> None:
        context: list[int] = []
        rid = None
        for number in range(4):
            new = prompt_of(200 + 10 * index + number, 20)
            answer = ask(engine, new, id=session, rid=rid)
            assert answer["prompt_token_ids"] == context + new
            context, rid = [*context, *new, *answer["output_ids"]], answer["meta_info"]["id"]
        contexts[session] = context

    threads = [threading.Thread(target=talk, args=pair) for pair in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert set(contexts) == set(sessions)
    for index, session in enumerate(sessions):
        context = contexts[session]
        pieces = [prompt_of(200 + 10 * index + number, 20) for number in range(4)]
        ends = list(itertools.accumulate(len(piece) + 6 for piece in pieces))
        for end in ends:
            assert ask(engine, context[: end - 6])["output_ids"] == context[end - 6 : end]
        engine.close_session(session)


# --- over HTTP --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = byte_level_folder(tmp_path_factory.mktemp("roomy"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 131_072}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "banyan", "serve", str(folder), "--load-format", "oracle", "--port", str(port)]
    command += ["--page-size", "16", "--max-total-tokens", "131072"]
    with (tmp_path_factory.mktemp("log") / "log").open("w") as log:
        process = subprocess.Popen([*command, "--strict", "--max-sessions", "2"], stdout=log, stderr=log)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as client:
        try:
            assert until(lambda: is_ready(client))
            yield client
        finally:
            process.terminate()
            process.wait(DEADLINE)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_every_route_takes_turns(client: httpx.Client) -> None:
    session = client.post("/open_session", json={"capacity_of_str_len": CAPACITY}).json()
    first = client.post("/generate", json={"input_ids": [5, 6], "sampling_params": SIX, "session_params": {"id": session}}).json()
    history = [5, 6, *first["output_ids"]]
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "rid": "second"}
    params = {"id": session, "rid": first["meta_info"]["id"]}
    second = client.post("/v1/completions", json={**body, "prompt": [7, 8], "session_params": params}).json()
    (choice,) = second["choices"]
    assert choice["prompt_token_ids"] == [*history, 7, 8]
    history += [7, 8, *choice["token_ids"]]
    last = {"input_ids": [9], "sampling_params": SIX, "session_params": {"id": session, "rid": "second"}}
    third = client.post("/generate", json={**last, "return_prompt_token_ids": True}).json()
    assert third["prompt_token_ids"] == [*history, 9]
    lost = client.post("/v1/completions", json={**body, "prompt": [7], "session_params": {"id": "no"}, "rid": "x"})
    assert lost.status_code == 400
    assert lost.json()["error"]["message"] == "Invalid request: session id no does not exist"
    assert client.post("/close_session", json={"session_id": session}).content == b""


def test_a_client_that_leaves_amid_a_turn_can_go_on(client: httpx.Client) -> None:
    session = client.post("/open_session", json={"capacity_of_str_len": CAPACITY, "streaming": True}).json()
    body = {"sampling_params": SIX, "session_params": {"id": session}, "return_prompt_token_ids": True}
    first = client.post("/generate", json={**body, "input_ids": prompt_of(1, 50)}).json()
    turn = {**body, "input_ids": [8], "sampling_params": ENDLESS, "stream": True}
    with client.stream("POST", "/generate", json=turn) as stream:
        lines = stream.iter_lines()  # dropping the iterator would close the connection
        next(lines)
        busy = client.post("/generate", json={**body, "input_ids": [9]})
        assert busy.status_code == 400
        assert "has a turn under way" in busy.text
    answers: list[httpx.Response] = []

    def is_served() -> bool:
        answers.append(client.post("/generate", json={**body, "input_ids": [9]}))
        return answers[-1].status_code == 200

    assert until(is_served)
    answer = answers[-1].json()
    assert answer["prompt_token_ids"] == [*prompt_of(1, 50), *first["output_ids"], 9]
    assert answer["meta_info"]["cached_tokens"] == 48
    assert client.post("/close_session", json={"session_id": session}).status_code == 200


def test_too_many_sessions(client: httpx.Client) -> None:
    body = {"capacity_of_str_len": 10, "timeout": 5}
    opened = [client.post("/open_session", json=body) for _ in range(3)]
    assert [answer.status_code for answer in opened] == [200, 200, 429]
    for answer in opened[:2]:
        client.post("/close_session", json={"session_id": answer.json()})
