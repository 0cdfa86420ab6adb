"""Processes that die or hang are started again: who is told what, what goes on, and what does not change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import CANARY, DEADLINE, Server, all_gone, oracle_folder, until

from banyan import Engine
from banyan.managers.errors import EngineRestartError

Start = Callable[..., Server]
LONG = {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return oracle_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: str, tmp_path: Path) -> Iterator[Start]:
    started: list[Server] = []

    def one(*options: str, faults: str = "") -> Server:
        started.append(Server(model, tmp_path / str(len(started)), *options, faults=faults))
        started[-1].wait_ready()
        return started[-1]

    yield one
    for server in started:
        server.close()


def post_in_thread(server: Server, body: dict[str, Any], replies: list[httpx.Response]) -> threading.Thread:
    def post() -> None:
        replies.append(httpx.post(server.url + "/generate", json=body, timeout=DEADLINE))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


@pytest.mark.parametrize("victim", ["scheduler", pytest.param("detokenizer", marks=pytest.mark.nightly)])
def test_a_death_fails_what_streams_and_nothing_else(start: Start, victim: str) -> None:
    server = start("--max-running-requests", "1", "--enable-metrics", "--watchdog-timeout", "60")
    server.check()
    children, replies = server.children(), list[httpx.Response]()
    body = {"text": "a", "stream": True, "incremental": True, "sampling_params": LONG | {"max_new_tokens": 3900}}
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=DEADLINE) as first:
        lines = first.iter_lines()
        next(lines)
        children["scheduler"].suspend()  # so that the first one is still under way when the second is queued
        waiter = post_in_thread(server, {**CANARY, "rid": "waits"}, replies)
        time.sleep(0.3)
        children[victim].kill()
        seen = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert seen[-1]["error"]["type"] == "EngineRestartError"
    assert seen[-1]["error"]["code"] == 503
    waiter.join(DEADLINE)
    assert replies[0].status_code == 200, replies[0].text
    assert replies[0].json()["output_ids"] == server.canary[1]
    until(lambda: server.http.get("/readyz").status_code == 200)
    assert all_gone(children)
    server.check()
    metrics = server.http.get("/metrics").text
    assert "banyan:restarts_total" in metrics
    assert 'class="EngineRestartError"' in metrics
    server.terminate()


@pytest.mark.nightly
def test_probes_tell_a_restart_from_an_end(start: Start) -> None:
    server = start()
    server.children()["scheduler"].kill()
    until(lambda: server.http.get("/readyz").json().get("reason") == "restarting")
    assert server.http.get("/livez").status_code == 200
    until(lambda: server.http.get("/readyz").status_code == 200)
    assert "The engine serves again after " in server.text()
    server.check()
    server.terminate()


@pytest.mark.nightly
def test_a_grammar_and_a_session_outlive_a_scheduler(start: Start) -> None:
    server = start()
    params = {"max_new_tokens": 40, "temperature": 0, "regex": "[a-z]{4}"}
    before = server.generate(text="x", sampling_params=params)["output_ids"]
    opened = server.http.post("/open_session", json={"capacity_of_str_len": 1000}).json()
    turn = {"text": "hello", "session_params": {"id": opened}, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    rid = server.generate(**turn)["meta_info"]["id"]
    server.children()["scheduler"].kill()
    until(lambda: server.http.get("/readyz").status_code == 503)
    assert server.generate(text="x", sampling_params=params)["output_ids"] == before  # queued while there is no scheduler
    turn["session_params"] = {"id": opened, "rid": rid}
    assert server.generate(**turn)["meta_info"]["prompt_tokens"] > 9
    server.check()


@pytest.mark.nightly
def test_the_budget_is_the_end(start: Start) -> None:
    server = start("--restart-budget", "1")
    server.children()["scheduler"].kill()
    until(lambda: "The engine serves again" in server.text())
    server.children()["detokenizer"].kill()
    assert server.end() == 1
    assert server.text().splitlines()[-1].startswith("banyan: error: the detokenizer process died: killed by SIGKILL")
    assert server.directories() == []


@pytest.mark.nightly
def test_a_request_that_kills_the_scheduler_is_sent_again_only_once(start: Start) -> None:
    server = start("--restart-budget", "5", faults="scheduler_die=100")
    body = {"text": "a", "sampling_params": LONG}
    reply = server.post(body)
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "EngineRestartError"
    assert server.text().count("starting again, ") <= 2


@pytest.mark.nightly
def test_a_scheduler_that_hangs_is_killed_with_all_stacks_in_the_log(start: Start) -> None:
    server = start("--watchdog-timeout", "4")
    server.children()["scheduler"].suspend()
    until(lambda: "watchdog: no heartbeat of the scheduler for " in server.text())
    until(lambda: "The engine serves again" in server.text())
    text = server.text()
    assert "stacks of the main process:\nThread 0x" in text or "stacks of the main process:\nCurrent thread" in text
    assert "stacks of the scheduler process:\n(none: it does not answer)" in text
    server.check()
    server.terminate()


@pytest.mark.nightly
def test_a_pause_of_the_machine_is_no_death(start: Start) -> None:
    server = start()
    children = server.children()
    children["scheduler"].suspend()
    time.sleep(2)
    assert server.http.get("/livez").status_code == 200
    children["scheduler"].resume()
    server.check()
    assert "starting again" not in server.text()


@pytest.mark.nightly
def test_an_engine_recovers_too(model: str) -> None:
    with Engine(model_path=model, load_format="oracle", log_level="critical") as engine:
        before = engine.generate("the quick", {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True})
        stream = engine.generate("a", LONG | {"max_new_tokens": 3000}, stream=True)
        next(stream)  # type: ignore[call-overload]
        os.kill(engine._launched.group.pids()[0], signal.SIGKILL)
        with pytest.raises(EngineRestartError):
            list(stream)
        after = engine.generate("the quick", {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True})
        assert after["output_ids"] == before["output_ids"]  # type: ignore[call-overload, index]


@pytest.mark.nightly
def test_many_clients_lose_nothing_but_what_had_begun(start: Start) -> None:
    server = start("--max-running-requests", "4")
    alone = server.generate(text="w 1", sampling_params=LONG | {"max_new_tokens": 300})["output_ids"]

    async def one(client: httpx.AsyncClient, index: int) -> httpx.Response:
        return await client.post("/generate", json={"text": f"w {index % 2}", "sampling_params": LONG | {"max_new_tokens": 300}})

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE) as client:
            tasks = [asyncio.create_task(one(client, index)) for index in range(40)]
            await asyncio.sleep(0.3)
            server.children()["scheduler"].kill()
            return await asyncio.gather(*tasks)

    replies = asyncio.run(crowd())
    lost = [reply for reply in replies if reply.status_code != 200]
    assert {reply.json()["error"]["type"] for reply in lost} <= {"EngineRestartError"}
    assert len(lost) < 20
    assert all(reply.json()["output_ids"] == alone for index, reply in enumerate(replies) if index % 2 and reply.status_code == 200)
    server.check()
