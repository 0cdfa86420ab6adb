"""Limits and lifecycle over the real processes and the token oracle: overload, deadlines, pauses."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from harness import CONFIG
from tiny_tokenizers import byte_level_folder

from banyan import Engine, RequestError

DEADLINE = 60.0
POOL = 1024
RUNNING, QUEUED = 2, 2
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 900}
TOKENS = 30  # of each request under overload


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = byte_level_folder(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


class Server:
    """A server process with few rows and a short queue."""

    def __init__(self, model: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        options = {"--max-running-requests": RUNNING, "--max-queued-requests": QUEUED, "--max-total-tokens": POOL, "--port": port}
        command = [sys.executable, "-m", "banyan", "serve", model, "--load-format", "oracle"]
        command += [str(part) for option in options.items() for part in option]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE)

    def wait_ready(self) -> None:
        until(lambda: self.process.poll() is not None or "ready to roll" in self.log.read_text())
        assert self.process.poll() is None, self.log.read_text()

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.client.get("/server_info").json()["internal_states"][0]
        return state

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        main = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (main, *main.children()))

    def generate(self, ids: list[int], headers: dict[str, str] | None = None, **params: Any) -> httpx.Response:
        return self.client.post("/generate", json={"input_ids": ids, "sampling_params": {**GREEDY, **params}}, headers=headers)


def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            pytest.fail("waited in vain")
        time.sleep(0.01)


@pytest.fixture(scope="module")
def running(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(model, tmp_path_factory.mktemp("log") / "log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """The module's server; every test must leave it idle, healthy and with all slots accounted for."""
    yield running
    until(lambda: running.state()["num_running_reqs"] == running.state()["num_waiting_reqs"] == 0)
    state = running.state()
    assert state["num_used_tokens"] == 0
    assert state["memory_balanced"]
    assert running.client.get("/health").status_code == 200
    assert "Traceback" not in running.log.read_text()


async def post_all(
    server: Server, bodies: list[dict[str, Any]], *, pause: float = 0.0, at_once: int = 1 << 20
) -> list[tuple[int, str]]:
    """(status, text) of each; one is sent every ``pause`` seconds, while fewer than ``at_once`` are under way."""
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE, limits=limits) as client:

        async def one(index: int, begin: float) -> tuple[int, str]:
            await asyncio.sleep(begin + index * pause - time.monotonic())
            async with gate:
                reply = await client.post("/generate", json=bodies[index])
            if reply.status_code == 503:
                assert reply.headers["retry-after"] == "1"
            return reply.status_code, reply.text

        begin = time.monotonic()
        return await asyncio.gather(*[one(index, begin) for index in range(len(bodies))])


def body(index: int, *, tokens: int, stream: bool = False) -> dict[str, Any]:
    draw = random.Random(index)
    ids = [draw.randrange(3, 500) for _ in range(20)]
    return {"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": tokens}, "stream": stream}


# --- overload ---------------------------------------------------------------------------------------------------------------------


def test_requests_that_end_with_their_prompt_do_not_block_the_rows(server: Server) -> None:
    for _ in range(5):
        answers = asyncio.run(post_all(server, [body(index, tokens=1) for index in range(3)]))
        assert [status for status, _ in answers] == [200] * 3
        assert all(len(json.loads(text)["output_ids"]) == 1 for _, text in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_every_client_of_a_burst_is_answered(server: Server, stream: bool) -> None:
    refused = server.state()["num_refused"]
    answers = asyncio.run(post_all(server, [body(index, tokens=50, stream=stream) for index in range(50)]))
    counts = Counter(status for status, _ in answers)
    assert set(counts) <= {200, 503}
    assert counts[200] >= RUNNING + QUEUED
    assert counts[503] > 0
    for status, text in answers:
        if status == 503:
            assert json.loads(text)["error"]["message"] == "The request queue is full."
        else:
            assert '"finish_reason":{"type":"length","length":50}' in text
    assert server.state()["num_refused"] == refused, "who is refused at once never waits for the scheduler"


def test_twice_the_rate_that_can_be_served(server: Server) -> None:
    """The queue stays bounded, the surplus is refused at once, nothing is lost, memory is flat."""
    refused = server.state()["num_refused"]
    begin = time.monotonic()
    served = asyncio.run(post_all(server, [body(index, tokens=TOKENS) for index in range(150)], at_once=RUNNING))
    seconds_each = (time.monotonic() - begin) / len(served)
    assert {status for status, _ in served} == {200}
    longest: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=server.url, timeout=DEADLINE) as client:
            while not stop.wait(0.1):
                longest.append(client.get("/server_info").json()["internal_states"][0]["num_waiting_reqs"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        answers, sizes = [], []
        for first in range(0, 2000, 500):
            bodies = [body(index, tokens=TOKENS, stream=bool(index % 2)) for index in range(first, first + 500)]
            answers += asyncio.run(post_all(server, bodies, pause=seconds_each / 2))
            sizes.append(server.memory())
    finally:
        stop.set()
        watcher.join()
    assert max(longest) <= QUEUED + RUNNING
    counts = Counter(status for status, _ in answers)
    assert counts[200] + counts[503] == 2000
    assert min(counts[200], counts[503]) > 100, "overload, but not only overload"
    assert server.state()["num_refused"] == refused, "who is refused at once never waits for the scheduler"
    for status, text in answers:
        assert (f'"finish_reason":{{"type":"length","length":{TOKENS}}}' if status == 200 else "queue is full") in text
    assert sizes[-1] - sizes[0] < 32 << 20, sizes


def test_what_can_never_fit_is_told_at_once(server: Server) -> None:
    too_long = server.generate([5] * (POOL + 1), max_new_tokens=1)
    assert too_long.status_code == 400
    assert "longer than the KV cache can serve" in too_long.json()["error"]["message"]
    answer = server.generate(list(range(3, 403)), max_new_tokens=None)
    assert answer.status_code == 200
    meta = answer.json()["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert meta["prompt_tokens"] + meta["completion_tokens"] <= POOL


# --- deadlines --------------------------------------------------------------------------------------------------------------------


def test_a_deadline_ends_what_runs_and_what_waits(server: Server) -> None:
    """Under a pause both phases last: two requests have rows, one waits; after the deadline all three are told."""
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(server.generate([9, 9, 9], {"X-Request-Timeout": "0.4"}, **LONG))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert server.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    for thread in threads:
        thread.join(DEADLINE)
    assert server.client.post("/continue_generation", json={}).status_code == 200
    assert {reply.status_code for reply in replies} <= {200, 504}
    late = [reply.json()["error"]["message"] for reply in replies if reply.status_code == 504]
    assert len(late) >= 2
    assert set(late) == {"Request deadline reached."}


def test_time_outs_of_the_server_and_priorities(model: str) -> None:
    options = {"request_queue_timeout": 0.2, "max_running_requests": 1, "schedule_policy": "priority", "max_queued_requests": 1}
    with Engine(model_path=model, load_format="oracle", disable_priority_preemption=True, **options) as engine:
        stream = engine.generate("a", {**GREEDY, "max_new_tokens": 3000}, stream=True, priority=1)
        assert isinstance(stream, Iterator)
        next(stream)
        assert engine.pause_generation("in_place").success
        errors: dict[str, str] = {}

        def ask(rid: str, priority: int) -> None:
            try:
                engine.generate("b", GREEDY, rid=rid, priority=priority)
            except RequestError as error:
                assert error.status_code == 503
                errors[rid] = str(error)

        threads = []
        for rid, priority in (("low", 1), ("high", 2), ("none", 0)):
            threads.append(threading.Thread(target=ask, args=(rid, priority)))
            threads[-1].start()
            until(lambda rid=rid: rid in errors or engine.get_server_info()["internal_states"][0]["num_waiting_reqs"] == 1)
        for thread in threads:
            thread.join(DEADLINE)
        assert errors["high"] == "Request waiting timeout reached."
        assert errors["low"] in ("The request is aborted by a higher priority request.", "Request waiting timeout reached.")
        assert errors["none"] in ("The request queue is full.", "Request waiting timeout reached.")
        assert engine.continue_generation().success
        assert len(list(stream)[-1]["output_ids"]) == 3000


# --- pauses -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_in_the_middle_of_a_stream_loses_nothing(server: Server, mode: str) -> None:
    whole = server.generate([7, 8, 9], **LONG).json()["output_ids"]
    server.client.post("/flush_cache", params={"timeout": 10})
    request = {"input_ids": [7, 8, 9], "sampling_params": LONG, "stream": True, "incremental": True}
    with server.client.stream("POST", "/generate", json=request) as reply:
        lines = (line[6:] for line in reply.iter_lines() if line)
        chunks = [json.loads(next(lines))]
        paused = httpx.post(server.url + "/pause_generation", json={"mode": mode}, timeout=DEADLINE)
        assert paused.json()["status"] == "ok"
        before = httpx.get(server.url + "/server_info", timeout=DEADLINE).json()["internal_states"][0]
        assert before["paused"]
        flush = httpx.post(server.url + "/flush_cache", timeout=DEADLINE)
        assert flush.status_code == (200 if mode == "retract" or not before["num_running_reqs"] else 400)
        after = httpx.get(server.url + "/server_info", timeout=DEADLINE).json()["internal_states"][0]
        assert after["num_decode_tokens"] == before["num_decode_tokens"]
        httpx.post(server.url + "/continue_generation", json={}, timeout=DEADLINE)
        chunks += [json.loads(line) for line in lines if line != "[DONE]"]
    assert [token for chunk in chunks for token in chunk["output_ids"]] == whole


def test_a_pause_that_aborts(server: Server) -> None:
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(server.generate([4, 4], **LONG))) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: server.state()["num_running_reqs"])
    assert server.client.post("/pause_generation").status_code == 400, "a body is wanted"
    assert server.client.post("/pause_generation", json={}).json()["status"] == "ok"
    late = threading.Thread(target=lambda: answers.append(server.generate([5, 5], max_new_tokens=3)))
    late.start()
    until(lambda: server.state()["num_waiting_reqs"])
    assert server.client.get("/health").status_code == 200
    server.client.post("/continue_generation", json={})
    for thread in (*threads, late):
        thread.join(DEADLINE)
    reasons = Counter(answer.json()["meta_info"]["finish_reason"]["type"] for answer in answers)
    assert reasons["abort"] >= 1
    assert reasons["length"] >= 1
    assert sum(reasons.values()) == 4
