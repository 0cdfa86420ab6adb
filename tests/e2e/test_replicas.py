"""Ranks and replicas as processes over the token oracle: same output, one answer for all, and what happens when one is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server import CANARY, DEADLINE, Server, all_gone, running, until

PROMPTS = [f"the quick brown fox {number} jumps over" for number in range(6)]
PARAMS = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}


def outputs(server: Server) -> list[Any]:
    return [answer["output_ids"] for answer in server.generate(text=PROMPTS, sampling_params=PARAMS)]


def ranks_of_loads(server: Server) -> list[int]:
    return [load["dp_rank"] for load in server.http.get("/v1/loads").json()["loads"]]


def children(server: Server, word: str) -> list[psutil.Process]:
    """Scheduler processes of a server, by the order of their start."""
    found = [p for p in psutil.Process(server.process.pid).children(recursive=True) if word in p.cmdline()]
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


@pytest.mark.parametrize("method", ["cache_aware"])
def test_replicas_answer_as_one_and_a_lost_one_comes_back(model: str, plain: Server, tmp_path: Path, method: str) -> None:
    expected = outputs(plain)
    with running(model, tmp_path, "--dp-size", "2", "--load-balance-method", method, "--enable-metrics") as server:
        assert outputs(server) == expected
        assert ranks_of_loads(server) == [0, 1]
        for rank in (0, 1):
            answer = server.generate(text=PROMPTS[0], sampling_params=PARAMS, data_parallel_rank=rank)
            assert answer["output_ids"] == expected[0]
        reply = server.post({"text": "x", "data_parallel_rank": 2})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "data_parallel_rank")
        state = server.state()
        assert [replica["dp_rank"] for replica in state["replicas"]] == [0, 1]
        assert state["num_decode_tokens"] == sum(replica["num_decode_tokens"] for replica in state["replicas"])
        assert all(replica["num_decode_tokens"] > 0 for replica in state["replicas"])
        assert server.post({}, "/flush_cache?timeout=10").status_code == 200
        victim = children(server, "scheduler")[0]
        os.kill(victim.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:  # half of the requests go to the one that is stopped, and begin nothing there
            waiting = pool.submit(outputs, server)
            time.sleep(1)
            os.kill(victim.pid, signal.SIGKILL)
            assert waiting.result(60) == expected, "what had not begun goes to the other one"
        until(lambda: "is lost" in server.text())
        assert outputs(server) == expected, "the other one goes on"
        until(lambda: "serves again" in server.text())
        until(lambda: ranks_of_loads(server) == [0, 1], 5)
        assert re.search(r'banyan:replica_num_running\{[^}]*dp_rank="1"', server.http.get("/metrics").text)
        assert outputs(server) == expected
        assert len(server.state()["replicas"]) == 2
        pids = [process.pid for process in children(server, "scheduler")]
        assert len(pids) == 2 and victim.pid not in pids


class Reader:
    """A stream that is read on a thread of its own; made when its first event is here."""

    def __init__(self, server: Server, **body: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._begun = threading.Event()
        self._server, self._body = server, {**body, "stream": True, "incremental": True}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(DEADLINE)

    def _read(self) -> None:
        with httpx.stream("POST", self._server.url + "/generate", json=self._body, timeout=DEADLINE) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                    self._begun.set()

    def last(self) -> dict[str, Any]:
        """Its last event, once it has ended."""
        self._thread.join(DEADLINE)
        return self.events[-1]


def scheduler_of_rank_0(server: Server) -> psutil.Process:
    """The one that works when its rank is asked for."""
    spent = {process: sum(process.cpu_times()[:2]) for process in children(server, "scheduler")}
    server.generate(text="a", sampling_params={"max_new_tokens": 800, "ignore_eos": True}, data_parallel_rank=0)
    return max(spent, key=lambda process: sum(process.cpu_times()[:2]) - spent[process])


def test_of_a_replica_that_is_killed_under_load_what_had_begun_fails_and_the_rest_goes_on(model: str, tmp_path: Path) -> None:
    options = ("--dp-size", "2", "--load-balance-method", "round_robin", "--max-running-requests", "1")
    long = {"max_new_tokens": 3900, "temperature": 0, "ignore_eos": True}
    with running(model, tmp_path, *options) as server:
        expected = server.generate(**CANARY)["output_ids"]
        victim = scheduler_of_rank_0(server)
        begun = Reader(server, text="a", sampling_params=long, data_parallel_rank=0)
        os.kill(victim.pid, signal.SIGSTOP)
        other = Reader(server, text="a", sampling_params=long, data_parallel_rank=1)
        with ThreadPoolExecutor(6) as pool:
            waiting = [pool.submit(server.post, CANARY) for _ in range(6)]  # half of them wait at the one that is stopped
            time.sleep(0.5)
            os.kill(victim.pid, signal.SIGKILL)
            lost = begun.last()["meta_info"]
            assert {"type": "abort", "status_code": 503, "err_type": "ReplicaLostError"}.items() <= lost["finish_reason"].items()
            assert lost["completion_tokens"] == sum(len(event["output_ids"]) for event in begun.events) > 0
            assert "replica 0 is lost" in server.text()
            replies = [future.result(DEADLINE) for future in waiting]
        assert [reply.status_code for reply in replies] == [200] * 6
        assert all(reply.json()["output_ids"] == expected for reply in replies)
        assert other.last()["meta_info"]["finish_reason"] == {"type": "length", "length": 3900}
        num_sent = num_surely_elsewhere = 0
        while "serves again" not in server.text():
            assert server.generate(**CANARY)["output_ids"] == expected
            num_sent += 1
            num_surely_elsewhere += "serves again" not in server.text()
        until(lambda: ranks_of_loads(server) == [0, 1])
        state = {replica["dp_rank"]: replica for replica in server.state()["replicas"]}
        assert state[0]["num_decode_tokens"] <= (num_sent - num_surely_elsewhere) * len(expected), (
            "it got nothing while it was lost"
        )
        assert server.post({**CANARY, "data_parallel_rank": 0}).json()["output_ids"] == expected


@pytest.mark.nightly
def test_a_controller_that_is_killed_comes_back_with_its_replicas(model: str, tmp_path: Path) -> None:
    with running(model, tmp_path, "--dp-size", "2") as server:
        expected = server.generate(**CANARY)["output_ids"]
        before = children(server, "scheduler")
        stream = Reader(server, text="a", sampling_params={"max_new_tokens": 3900, "temperature": 0, "ignore_eos": True})
        server.children()["controller"].kill()
        assert stream.last()["error"]["type"] == "EngineRestartError"
        assert server.generate(**CANARY)["output_ids"] == expected, "it waited"
        until(lambda: all_gone({str(process.pid): process for process in before}))
        until(lambda: ranks_of_loads(server) == [0, 1])


@pytest.mark.parametrize(
    "options",
    [["--tp-size", "2"], pytest.param(["--pp-size", "2", "--dp-size", "2"], marks=pytest.mark.nightly)],
    ids=["tp2", "pp2 dp2"],
)
def test_ranks_decide_alike_and_leave_nothing_behind(model: str, plain: Server, tmp_path: Path, options: list[str]) -> None:
    expected = outputs(plain)
    with running(model, tmp_path, *options, "--check-decisions", "--chunked-prefill-size", "16") as server:
        assert outputs(server) == expected
        ranks = children(server, "scheduler")
        assert len(ranks) == 2 * (2 if "--dp-size" in options else 1)
    assert all_gone({str(rank.pid): rank for rank in ranks})


def test_a_rank_that_is_killed_or_hangs_ends_the_group_with_a_report(model: str, start: Any) -> None:
    server = start("--tp-size", "2", "--dist-timeout", "3", "--restart-budget", "0", "--max-running-requests", "4")
    server.wait_ready()
    first, second = children(server, "scheduler")
    os.kill(second.pid, signal.SIGSTOP)
    until(lambda: "rank 1 gave no sign of life for" in server.text(), 30)
    until(lambda: server.process.poll() is not None, 30)
    assert all_gone({"first": first, "second": second})


def test_a_lost_rank_is_replaced_with_its_group(model: str, tmp_path: Path) -> None:
    with running(model, tmp_path, "--tp-size", "2") as server:
        before = server.generate(**CANARY)
        first, second = children(server, "scheduler")
        os.kill(second.pid, signal.SIGKILL)
        until(lambda: "serves again" in server.text())
        assert server.generate(**CANARY)["output_ids"] == before["output_ids"]
        assert not {first.pid, second.pid} & {process.pid for process in children(server, "scheduler")}
