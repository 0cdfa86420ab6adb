"""Replicas in a Ray cluster of two local nodes: one node is killed, the other goes on serving, the lost replica comes back."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from server import Server, answer_of, until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
]

RAY_NODES = Path(__file__).parents[1] / "support" / "ray_nodes.py"  # imports ray
PROMPTS = [f"the quick brown fox {number} jumps over" for number in range(6)]
PARAMS = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
SLOW = 240.0  # seconds; Ray starts its nodes and actors in their own time


class Nodes:
    """A cluster, by its process."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, str(RAY_NODES), folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()
        assert self.address, "the cluster did not start"

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, what: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def stop(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.stdout.close()
            self.process.kill()
            self.process.wait()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="bray-", dir="/tmp")  # paths of sockets in it must be short
    before = set(Path("/dev/shm").iterdir())
    nodes = Nodes(folder)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    try:
        yield nodes
    finally:
        nodes.stop()
        left = [process.pid for process in psutil.process_iter() if mentions(process, folder)]
        shutil.rmtree(folder, ignore_errors=True)
    assert not left
    assert set(Path("/dev/shm").iterdir()) <= before


def mentions(process: psutil.Process, folder: str) -> bool:
    try:
        return any(folder in word for word in process.cmdline())
    except psutil.Error:
        return False


def ranks(model: str) -> dict[int, psutil.Process]:
    """Scheduler processes below the actors, wherever."""
    found = [
        process for process in psutil.process_iter() if mentions(process, "processes.process") and mentions(process, "scheduler")
    ]
    return {process.pid: process for process in found if "RankHost" in " ".join(process.parent().cmdline())}


def outputs(server: Server) -> list[Any]:
    return [answer["output_ids"] for answer in server.generate(text=PROMPTS, sampling_params=PARAMS)]


@pytest.fixture
def serving(model: str, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def serve(*options: str) -> Server:
        started.append(Server(model, tmp_path / "s", "--use-ray", *options))
        until(lambda: "ready to roll" in started[0].text() or started[0].process.poll() is not None, SLOW)
        assert started[0].process.poll() is None, started[0].text()
        return started[0]

    yield serve
    for one in started:
        one.close()


def test_a_node_is_killed_and_its_replica_comes_back(
    nodes: Nodes, serving: Callable[..., Server], model: str, plain: Server
) -> None:
    expected = outputs(plain)
    server = serving("--dp-size", "2", "--dist-timeout", "8", "--load-balance-method", "cache_aware")
    assert outputs(server) == expected
    for rank in (0, 1):
        assert server.generate(text=PROMPTS[0], sampling_params=PARAMS, data_parallel_rank=rank)["output_ids"] == expected[0]
    first = set(ranks(model))
    assert len(first) == 2
    nodes.tell("kill")
    until(lambda: "is lost" in server.text(), SLOW)
    for _ in range(3):
        assert outputs(server) == expected, "the other one goes on"
    assert len(server.state()["replicas"]) == 1
    until(lambda: "has no room for replica" in server.text(), SLOW)
    nodes.tell("add")
    until(lambda: "serves again" in server.text(), SLOW)
    assert outputs(server) == expected
    assert [replica["dp_rank"] for replica in server.state()["replicas"]] == [0, 1]
    loads = answer_of(server.http.get("/v1/loads"))["loads"]
    assert [load["dp_rank"] for load in loads] == [0, 1]
    there = ranks(model)
    assert len(there) == 2 and len(first & set(there)) == 1
    server.terminate()
    until(lambda: not ranks(model))


def test_ranks_of_one_replica_on_two_nodes(nodes: Nodes, serving: Callable[..., Server], model: str, plain: Server) -> None:
    server = serving("--tp-size", "2", "--check-decisions")
    assert outputs(server) == outputs(plain)
    assert len(ranks(model)) == 2
    server.terminate()
    until(lambda: not ranks(model))


def test_no_cluster_is_said_so(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    server = Server(model, tmp_path / "s", "--use-ray")
    try:
        assert server.end() == 1
        assert "no Ray cluster can be reached" in server.text()
    finally:
        server.close()
