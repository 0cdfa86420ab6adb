"""Requests that queue, are aborted, lose their client or meet their double; afterwards everything is as before."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from harness import EOS, SCRIPT
from server import DEADLINE, Server, events, running, until

LONG = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
SHORT = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def single(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One request runs at a time, and its answers are long, so that all else waits."""
    with running(model, tmp_path_factory.mktemp("s"), "--max-running-requests", "1", "--chunked-prefill-size", "64") as server:
        yield server


ENDLESS = {"max_new_tokens": 3900, "temperature": 0, "ignore_eos": True}


@contextmanager
def open_request(server: Server, body: dict[str, Any], path: str = "/generate") -> Iterator[socket.socket]:
    """A request on a socket of its own; leaving the block disconnects."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as connection:
        connection.sendall(head.encode() + data)
        yield connection


def occupied(server: Server, running: int, waiting: int = 0) -> Callable[[], bool]:
    def check() -> bool:
        state = server.state()
        return bool((state["num_running_reqs"], state["num_waiting_reqs"]) == (running, waiting))

    return check


def abort(server: Server, **body: Any) -> int:
    reply = server.post(body, "/abort_request")
    assert reply.status_code == 200, reply.text
    return int(reply.json()["aborted"])


# --- limits and queues


@pytest.mark.parametrize("limit", [0, 1])
def test_requests_that_end_with_their_prompt_make_room(server: Server, limit: int) -> None:
    """More of them than may run at once, in one burst and again."""
    for _ in range(3):
        answers = server.generate(
            input_ids=[[5, 6, index] for index in range(9)], sampling_params={**SHORT, "max_new_tokens": limit}
        )
        assert [len(answer["output_ids"]) for answer in answers] == [limit] * 9


def test_fifty_clients_at_once(server: Server) -> None:
    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(lambda index: server.post({"text": f"client {index}", "sampling_params": SHORT}), range(50)))
    assert [reply.status_code for reply in replies] == [200] * 50


def test_priority_is_harmless(server: Server) -> None:
    expected = server.generate(text="a", sampling_params=SHORT)["output_ids"]
    for priority in (None, 0, -5, 10**6, 1 << 31):
        assert server.generate(text="a", sampling_params=SHORT, priority=priority)["output_ids"] == expected
    refused = server.http.post("/generate", json={"text": "a", "priority": (1 << 63) - 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_the_cache_is_only_seen_in_the_count(server: Server) -> None:
    assert server.http.post("/flush_cache?timeout=30").status_code == 200
    prompt = list(range(3, 103))
    cold, warm = (server.generate(input_ids=prompt, sampling_params=LONG | {"max_new_tokens": 20}) for _ in range(2))
    assert cold["output_ids"] == warm["output_ids"]
    assert (cold["meta_info"]["cached_tokens"], warm["meta_info"]["cached_tokens"] in (96, 99)) == (0, True)
    salted = server.generate(input_ids=prompt, sampling_params=SHORT, cache_salt="other")
    assert salted["meta_info"]["cached_tokens"] == 0


# --- names


@pytest.mark.parametrize("stream", [False, True])
def test_a_name_that_lives_is_refused(single: Server, stream: bool) -> None:
    single.check()
    with open_request(single, {"text": "a", "rid": "x", "sampling_params": ENDLESS, "stream": True}):
        until(occupied(single, 1))
        for body in ({"rid": "x"}, {"rid": ["y", "x"], "text": ["a", "b"]}, {"rid": "x", "text": ["a", "b"]}):
            reply = single.post({"text": "a", "sampling_params": SHORT, "stream": stream, **body})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "rid"), reply.text
        assert abort(single, rid="x") == 1
    until(lambda: single.post({"text": "a", "rid": "x", "sampling_params": SHORT}).status_code == 200)  # free again
    single.check()


def test_two_of_one_name_at_the_same_moment(server: Server) -> None:
    def ask(_: int) -> int:
        return server.post({"text": "a", "rid": "same", "sampling_params": LONG | {"max_new_tokens": 100}}).status_code

    with ThreadPoolExecutor(6) as pool:
        codes = list(pool.map(ask, range(6)))
    assert set(codes) <= {200, 400}
    assert 200 in codes


# --- aborts


def test_abort_hits_exactly_the_named(single: Server) -> None:
    single.check()
    with ThreadPoolExecutor(4) as pool:
        calls = {
            rid: pool.submit(single.generate, text="a", rid=rid, sampling_params=ENDLESS | {"n": 2 if rid == "many" else 1})
            for rid in ("req-1", "req-10", "many")
        }
        until(occupied(single, 1, 3))
        assert abort(single, rid="req") == abort(single, rid="req-") == abort(single, rid="nothing") == 0
        assert abort(single, rid="many") == 2
        assert [item["meta_info"]["finish_reason"]["type"] for item in calls["many"].result(DEADLINE)] == ["abort"] * 2
        assert abort(single, rid="req-1") == 1
        assert calls["req-1"].result(DEADLINE)["meta_info"]["finish_reason"]["type"] == "abort"
        until(occupied(single, 1))
        assert not calls["req-10"].done()
        assert abort(single, abort_all=True) == 1
        assert calls["req-10"].result(DEADLINE)["meta_info"]["finish_reason"]["type"] == "abort"
    single.check()


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None}, {"rid": "", "abort_all": False}, {"rid": 5}, {"rid": ["a"]}])
def test_abort_of_nothing_in_particular_is_refused(single: Server, body: dict[str, Any]) -> None:
    with open_request(single, {"text": "a", "sampling_params": ENDLESS}):
        until(occupied(single, 1))
        reply = single.post(body, "/abort_request")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "rid")
        assert occupied(single, 1)()
    until(single.at_rest)


def test_an_aborted_stream_ends_with_all_it_has(single: Server) -> None:
    for incremental in (False, True):
        with httpx.stream(
            "POST",
            single.url + "/generate",
            json={"text": "a", "rid": "s", "stream": True, "incremental": incremental, "sampling_params": ENDLESS},
            timeout=DEADLINE,
        ) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            assert abort(single, rid="s") == 1
            chunks = [json.loads(first.removeprefix("data: ")), *events(lines)]
        last = chunks[-1]["meta_info"]
        assert last["finish_reason"]["type"] == "abort"
        ids = [id for chunk in chunks for id in chunk["output_ids"]] if incremental else chunks[-1]["output_ids"]
        assert last["completion_tokens"] == len(ids)
        assert last["prompt_tokens"] == 1
    single.check()


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_at_any_moment(server: Server, stream: bool) -> None:
    """Before, while and after: the answer is the beginning of the whole one, and no abort of a finished request does harm."""
    whole = server.generate(text="the quick", sampling_params=LONG | {"max_new_tokens": 60})["output_ids"]
    draw = random.Random(3)
    for index in range(20):
        rid = f"any-{stream}-{index}"
        thread = threading.Timer(draw.random() * 0.08, abort, [server], {"rid": rid})
        thread.start()
        body = {"text": "the quick", "rid": rid, "sampling_params": LONG | {"max_new_tokens": 60}}
        answer = server.stream(**body)[-1] if stream else server.generate(**body)
        thread.join()
        assert answer["output_ids"] == whole[: len(answer["output_ids"])]
        assert answer["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
        assert abort(server, rid=rid) == 0


# --- clients that go


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["decoding", "queued", "prefill in chunks"])
def test_a_client_that_goes_makes_room(single: Server, path: str, stream: bool, phase: str) -> None:
    single.check()
    log = len(single.text())
    aborted = single.state()["num_aborted"]
    openai = path != "/generate"
    body: dict[str, Any] = {"text": "a", "stream": stream, "sampling_params": ENDLESS}
    if openai:
        body = {"prompt": "a", "stream": stream, "max_tokens": 3900, "ignore_eos": True}
    if phase == "prefill in chunks":
        ids = [index % 300 + 3 for index in range(3000)]
        body |= (
            {"prompt": ids, "max_tokens": 900}
            if openai
            else {"input_ids": ids, "sampling_params": ENDLESS | {"max_new_tokens": 900}}
        )
        body.pop("text", None)
    if phase == "queued":
        with open_request(single, {"text": "b", "rid": "first", "sampling_params": ENDLESS}):
            until(occupied(single, 1))
            with open_request(single, body, path):
                until(occupied(single, 1, 1))
            until(occupied(single, 1))
    else:
        with open_request(single, body, path) as connection:
            until(occupied(single, 1))
            if stream and phase == "decoding":
                connection.recv(1000)
    # The only place is free again long before thousands of tokens could be made.
    assert single.generate(text="c", sampling_params=SHORT)["meta_info"]["completion_tokens"] == 3
    until(single.at_rest)
    assert single.state()["num_aborted"] - aborted == (2 if phase == "queued" else 1)
    news = [line for line in single.text()[log:].splitlines() if "batch, #" not in line]
    assert len(news) <= 1, news
    single.check()


def test_a_half_closed_connection_is_a_client_that_went(single: Server) -> None:
    with open_request(single, {"text": "a", "stream": True, "sampling_params": ENDLESS}) as connection:
        until(occupied(single, 1))
        connection.shutdown(socket.SHUT_WR)
        until(single.at_rest)
    single.check()


def test_a_client_that_never_reads_is_no_burden(single: Server) -> None:
    """Its stream fills the socket's buffers; others are served, and when it goes nothing is left."""
    with open_request(single, {"text": "a", "stream": True, "sampling_params": ENDLESS | {"max_new_tokens": 1500}}):
        until(occupied(single, 0))
        assert single.generate(text="c", sampling_params=SHORT)["meta_info"]["completion_tokens"] == 3
    single.check()


def test_half_a_body(single: Server) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
    with socket.create_connection(("127.0.0.1", single.port)) as connection:
        connection.sendall(head + b'{"text": "a"')
    single.check()


def test_flush_is_refused_while_something_runs(single: Server) -> None:
    with open_request(single, {"text": "a", "sampling_params": ENDLESS}):
        until(occupied(single, 1))
        reply = single.http.post("/flush_cache")
        assert (reply.status_code, reply.text) == (400, "Flush cache failed: 1 requests run and 0 wait.")
    assert single.http.post("/flush_cache?timeout=30").status_code == 200
    single.check()


# --- the storm


def test_two_hundred_requests_with_aborts_and_disconnects(start: Callable[..., Server]) -> None:
    """Streams and whole answers, scripts and free text, over a small pool and with retractions; a fifth of them is cut off."""
    options = ["--max-total-tokens", "600", "--max-running-requests", "16", "--page-size", "4", "--chunked-prefill-size", "32"]
    server = start(*options, faults="retract_every=25")
    server.wait_ready()
    draw = random.Random(11)
    server.check()
    before = server.canary
    prompts = [f"the quick brown fox {number} jumps" for number in range(6)]
    expected = {prompt: server.generate(text=prompt, sampling_params=LONG)["output_ids"] for prompt in prompts}
    plans = [(index, draw.choice(prompts), draw.randint(1, 120), draw.random() < 0.5, draw.random()) for index in range(200)]
    cut = set(draw.sample(range(200), 40))
    errors: list[Any] = []

    def one(plan: tuple[int, str, int, bool, float]) -> None:
        index, prompt, limit, stream, chance = plan
        body = {"text": prompt, "rid": f"r{index}", "stream": stream, "sampling_params": LONG | {"max_new_tokens": limit}}
        if index % 7 == 0:
            ids = [100 + index, 90, 80]
            body = {"input_ids": [SCRIPT, 3, *ids], "rid": f"r{index}", "stream": stream}
        if index in cut and chance < 0.5:
            with open_request(server, body):
                time.sleep(chance * 0.4)
            return
        if index in cut:
            threading.Timer((chance - 0.5) * 0.6, abort, [server], {"rid": f"r{index}"}).start()
        answer = server.stream(**body)[-1] if stream else server.generate(**body)
        kind = answer["meta_info"]["finish_reason"]["type"]
        right = [*ids, EOS] if index % 7 == 0 else expected[prompt][:limit]
        good = kind != "abort" and answer["output_ids"] == right
        if not good and not (index in cut and kind == "abort" and answer["output_ids"] == right[: len(answer["output_ids"])]):
            errors.append((plan, answer))

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, plans))
    assert errors == []
    until(server.at_rest)
    state = server.state()
    assert state["num_aborted"] > 0
    assert state["num_retracted"] > 0
    server.check()
    assert server.canary == before
    assert [server.generate(text=prompt, sampling_params=LONG)["output_ids"] for prompt in prompts] == list(expected.values())
    assert server.http.post("/flush_cache?timeout=10").status_code == 200
    state = server.state()
    assert (state["num_used_tokens"], state["num_cached_tokens"], state["memory_balanced"]) == (0, 0, True)
    assert "Traceback" not in server.text()
    server.terminate()
