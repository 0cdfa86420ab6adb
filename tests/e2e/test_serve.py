"""``banyan serve`` as a process of its own, over the token oracle: start, signals, deaths."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import DEADLINE, Server, all_gone, until

LONG = {"text": "the quick", "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(start: Callable[..., Server], number: signal.Signals) -> None:
    server = start("--decode-log-interval", "1")
    server.wait_ready()
    children = server.children()
    assert set(children) == {"scheduler", "detokenizer"}
    assert httpx.get(server.url + "/health").text == ""
    with httpx.stream(
        "POST", server.url + "/generate", json={**LONG, "stream": True, "incremental": True}, timeout=DEADLINE
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(number)
        until(lambda: "draining" in server.log.read_text())
        until(lambda: _refused(server))
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["meta_info"]["finish_reason"] == {"type": "length", "length": 1000}
    assert server.end() == 0
    assert all_gone(children)
    assert "Traceback" not in server.log.read_text()


def _refused(server: Server) -> bool:
    """It still answers, but takes nothing new."""
    assert httpx.get(server.url + "/health").status_code == 503
    return httpx.post(server.url + "/generate", json=LONG).status_code == 503


def test_a_second_signal_ends_at_once(start: Callable[..., Server]) -> None:
    server = start()
    server.wait_ready()
    children = server.children()
    children["scheduler"].suspend()  # so that what runs never finishes
    try:
        with httpx.stream("POST", server.url + "/generate", json={**LONG, "stream": True}, timeout=0.5):
            pass
    except httpx.TransportError:
        pass
    holder = socket.create_connection(("127.0.0.1", server.port))
    body = json.dumps(LONG).encode()
    holder.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    time.sleep(0.2)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: "draining" in server.log.read_text())
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 128 + signal.SIGTERM
    holder.close()
    children["scheduler"].resume()
    until(lambda: all_gone(children))


def test_a_signal_while_starting(start: Callable[..., Server]) -> None:
    server = start()
    until(lambda: len(server.children()) == 2)
    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    until(lambda: all_gone(children))


@pytest.mark.parametrize("name", ["scheduler", "detokenizer"])
def test_a_dead_child_ends_the_server(start: Callable[..., Server], name: str) -> None:
    server = start("--restart-budget", "0")
    server.wait_ready()
    children = server.children()
    with httpx.stream(
        "POST", server.url + "/generate", json={**LONG, "stream": True, "incremental": True}, timeout=DEADLINE
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        children[name].kill()
        events = [line for line in lines if line]
    assert json.loads(events[-1][6:])["error"]["code"] == 503
    assert server.end() == 1
    assert all_gone(children)
    assert server.log.read_text().splitlines()[-1].startswith(f"banyan: error: the {name} process died: ")


def test_a_broken_model_ends_in_one_line(start: Callable[..., Server], model: str) -> None:
    (Path(model) / "config.json").rename(Path(model) / "aside")
    try:
        server = start()
        assert server.end() == 1
    finally:
        (Path(model) / "aside").rename(Path(model) / "config.json")
    assert server.log.read_text().splitlines()[-1].startswith("banyan: error: ")


def test_probes_answer_while_the_model_loads(start: Callable[..., Server]) -> None:
    server = start()
    seen: list[dict[str, Any]] = []

    def ready() -> bool:
        try:
            seen.append(httpx.get(server.url + "/readyz").json())
        except httpx.TransportError:
            return False
        return bool(seen[-1]["status"] == "ready")

    until(ready)
    assert seen[0]["status"] == "starting"


def test_explain(model: str) -> None:
    command = [sys.executable, "-m", "banyan", "serve", model, "--load-format", "oracle", "--explain"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert "max_total_num_tokens = " in done.stdout
