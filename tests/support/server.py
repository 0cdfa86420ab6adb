"""``banyan serve`` as a process of its own over the token oracle, what it wrote, and a client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from harness import CONFIG
from tiny_tokenizers import byte_level_folder

DEADLINE = 60.0
START_DEADLINE = 180.0
CANARY = {"text": "the quick brown fox", "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}}


def oracle_folder(folder: Path, **config: Any) -> str:
    """A model folder for the oracle: a byte-level tokenizer and a tiny config."""
    byte_level_folder(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


def until(condition: Callable[[], Any], seconds: float = DEADLINE) -> None:
    """Wait until the condition holds; the test fails if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail("waited in vain")
        time.sleep(0.02)


def answer_of(reply: httpx.Response) -> Any:
    """The JSON of a reply that must be a success."""
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(lines: Iterator[str]) -> list[Any]:
    """The events of a stream that ended as it should, or with an error event."""
    texts = [line.removeprefix("data: ") for line in lines if line]
    found = [json.loads(text) for text in texts if text != "[DONE]"]
    assert (texts[-1] == "[DONE]") == ("error" not in found[-1]), texts[-1]
    return found


class Server:
    """A server process. Its temporary files lie in ``folder``, so that what it leaves behind is seen."""

    def __init__(self, model: str, folder: Path, *options: str, faults: str = "", load_format: str = "oracle") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log"
        command = [sys.executable, "-m", "banyan", "serve", model, "--load-format", load_format, "--port", str(self.port), *options]
        environment = {**os.environ, "BANYAN_FAULTS": faults, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE, limits=httpx.Limits(max_keepalive_connections=0))
        self.canary: Any = None

    # --- life

    def wait_ready(self) -> None:
        until(lambda: self.process.poll() is not None or "fired up and ready to roll!" in self.text(), START_DEADLINE)
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text()

    def children(self) -> dict[str, psutil.Process]:
        found = psutil.Process(self.process.pid).children()
        return {name: child for child in found for name in ("scheduler", "detokenizer", "controller") if name in child.cmdline()}

    def directories(self) -> list[Path]:
        """The socket directories that exist."""
        return sorted(self.folder.glob("banyan-*"))

    def shared_memory(self) -> list[str]:
        """Files in shared memory that its processes have mapped."""
        processes = [psutil.Process(self.process.pid), *self.children().values()]
        return [item.path for process in processes for item in process.memory_maps() if item.path.startswith("/dev/shm")]

    def end(self) -> int:
        """Wait for its exit status."""
        return self.process.wait(DEADLINE)

    def close(self) -> None:
        """Kill what is left; for the end of a test that may have failed."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def terminate(self) -> None:
        """SIGTERM to a healthy, idle server: status 0, no traceback, nothing left."""
        children, memory = self.children(), self.shared_memory()
        self.process.send_signal(signal.SIGTERM)
        assert self.end() == 0, self.text()
        assert all_gone(children)
        assert self.directories() == []
        assert not [path for path in memory if os.path.exists(path)]

    # --- a client

    def post(self, body: Any, path: str = "/generate") -> httpx.Response:
        return self.http.post(path, json=body)

    def generate(self, **body: Any) -> Any:
        return answer_of(self.post(body))

    def stream(self, path: str = "/generate", **body: Any) -> list[Any]:
        """All chunks of a stream."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            return events(reply.iter_lines())

    def state(self) -> dict[str, Any]:
        """The scheduler's state."""
        state: dict[str, Any] = answer_of(self.http.get("/server_info"))["internal_states"][0]
        return state

    def at_rest(self) -> bool:
        """Nothing runs or waits; then the books must balance and every slot be free or cached."""
        state = self.state()
        if state["num_running_reqs"] or state["num_waiting_reqs"]:
            return False
        assert state["memory_balanced"], state
        return not state["num_used_tokens"]

    def check(self) -> None:
        """It is healthy, comes to rest with balanced books, and says the same as ever."""
        assert self.http.get("/health").status_code == 200
        until(self.at_rest)
        answer = self.generate(**CANARY)
        said = (answer["text"], answer["output_ids"])
        self.canary = self.canary or said
        assert said == self.canary
        until(self.at_rest)


def all_gone(children: dict[str, psutil.Process]) -> bool:
    """None of them runs."""
    return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children.values())


@contextmanager
def running(model: str, folder: Path, *options: str, faults: str = "", load_format: str = "oracle") -> Iterator[Server]:
    """A ready server for many tests, which must be well before and after them, log no exception and leave nothing."""
    server = Server(model, folder, *options, faults=faults, load_format=load_format)
    try:
        server.wait_ready()
        yield server
        server.check()
        server.terminate()
        if not faults:
            assert "Traceback" not in server.text()
    finally:
        server.close()
