"""Chaos: each way in which processes, machines and clients fail, what a client saw, and how long until it was served again.

``make chaos`` prints the table of docs/operations.md. Every scenario ends with a server that is healthy and balanced, or gone.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from server import Server, oracle_folder, until

BODY = {"text": "a story", "sampling_params": {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True}}
SHORT = {"text": "the quick brown fox", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
LOAD = 8  # clients under load
IDLE = 5000  # connections
PATIENCE = 300.0  # seconds that a client waits for its answer


class Outcome(NamedTuple):
    """seconds: until a client was served again; None where it was never interrupted."""

    scenario: str
    saw: str
    seconds: float | None


class Load:
    """Clients that ask without pause and note what they got."""

    def __init__(self, server: Server) -> None:
        self.statuses: list[str] = []
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(LOAD)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        before = self._server.state()["num_decode_tokens"]
        until(lambda: self._server.state()["num_decode_tokens"] > before + LOAD)  # they have begun to answer
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                reply = httpx.post(self._server.url + "/generate", json=BODY, timeout=PATIENCE)
                self.statuses.append("200" if reply.status_code == 200 else f"{reply.status_code} {reply.json()['error']['type']}")
            except httpx.HTTPError as error:
                self.statuses.append(type(error).__name__)
                self._stop.wait(0.1)

    def saw(self) -> str:
        """The kinds of answers, the failures with their number."""
        kinds = {status: self.statuses.count(status) for status in dict.fromkeys(self.statuses)}
        return ", ".join("200" if status == "200" else f"{count} x {status}" for status, count in sorted(kinds.items()))


class Chaos:
    """The scenarios over one model."""

    def __init__(self, model: str, load_format: str, folder: Path) -> None:
        self._model = model
        self._load_format = load_format
        self._folder = folder
        self._number = 0

    def run(self, only: str) -> list[Outcome]:
        found = []
        for scenario in (
            *(self.kill_scheduler, self.kill_detokenizer, self.kill_controller, self.kill_replica, self.kill_main),
            *(self.stop_scheduler, self.port_taken, self.disk_full, self.slow_readers, self.half_open, self.idle_connections),
        ):
            if only in scenario.__name__:
                found.append(scenario())
                print("done:", found[-1], file=sys.stderr, flush=True)
        return found

    @contextlib.contextmanager
    def _server(self, *options: str) -> Any:
        self._number += 1
        server = Server(self._model, self._folder / str(self._number), *options, load_format=self._load_format)
        try:
            server.wait_ready()
            yield server
        finally:
            server.close()

    def _kill(self, name: str, *options: str) -> Outcome:
        with self._server(*options) as server:
            before = served(server)
            with Load(server) as load:
                begin = time.monotonic()
                server.children()[name].kill()
                until(lambda: server.http.get("/readyz").status_code == 503)
                until(lambda: server.http.get("/readyz").status_code == 200)
                assert served(server) == before
                seconds = time.monotonic() - begin
            until(server.at_rest)
            server.terminate()
        return Outcome(f"kill -9 of the {name} under load", load.saw(), seconds)

    def kill_scheduler(self) -> Outcome:
        return self._kill("scheduler")

    def kill_detokenizer(self) -> Outcome:
        return self._kill("detokenizer")

    def kill_controller(self) -> Outcome:
        return self._kill("controller", "--dp-size", "2")

    def kill_replica(self) -> Outcome:
        with self._server("--dp-size", "2") as server:
            before = served(server)
            with Load(server) as load:
                begin = time.monotonic()
                psutil.Process(server.children()["controller"].pid).children()[0].kill()
                until(lambda: " is lost: " in server.text())
                assert served(server) == before
                seconds = time.monotonic() - begin
                until(lambda: " serves again" in server.text(), PATIENCE)
                both = time.monotonic() - begin
            until(server.at_rest)
            server.terminate()
        return Outcome(f"kill -9 of one of two replicas under load (both again after {both:.1f} s)", load.saw(), seconds)

    def kill_main(self) -> Outcome:
        with self._server() as server, Load(server) as load:
            children = server.children()
            begin = time.monotonic()
            server.process.kill()
            server.process.wait()
            until(lambda: not any(child.is_running() for child in children.values()))
        gone = time.monotonic() - begin
        with self._server() as server:
            served(server)
            seconds = time.monotonic() - begin
            server.terminate()
        return Outcome(f"kill -9 of the main process (children gone after {gone:.1f} s, then started anew)", load.saw(), seconds)

    def stop_scheduler(self) -> Outcome:
        with self._server() as server:
            with Load(server) as load:
                scheduler = server.children()["scheduler"]
                scheduler.suspend()
                time.sleep(10)
                alive = server.http.get("/livez").status_code
                begin = time.monotonic()
                scheduler.resume()
                served(server)
                seconds = time.monotonic() - begin
            until(server.at_rest)
            server.terminate()
        return Outcome(f"SIGSTOP of the scheduler for 10 s (/livez {alive})", load.saw(), seconds)

    def port_taken(self) -> Outcome:
        with self._server() as server:
            command = [*(sys.executable, "-m", "banyan", "serve", self._model, "--load-format", self._load_format)]
            done = subprocess.run([*command, "--port", str(server.port)], capture_output=True, text=True, timeout=60)
            assert done.returncode == 1, done.stderr
            served(server)
            server.terminate()
        return Outcome("port taken", f"status 1, `{done.stderr.splitlines()[-1].partition('error: ')[2]}`", None)

    def disk_full(self) -> Outcome:
        target = Path(tempfile.mkdtemp(dir=self._folder))
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(target)], capture_output=True)
        if mounted.returncode:
            return Outcome("disk full", "not tried: no right to mount a small file system", None)
        try:
            with self._server("--record-decisions", str(target / "record.jsonl"), "--crash-dump-folder", str(target)) as server:
                # the record is written whenever nothing else is to do
                until(lambda: served(server) and "No space left on device" in server.text(), PATIENCE)
                with Load(server) as load:
                    served(server)
                until(server.at_rest)
                server.terminate()
        finally:
            until(lambda: subprocess.run(["umount", str(target)], capture_output=True).returncode == 0)  # the processes are gone
        return Outcome("disk full under --record-decisions", f"{load.saw()}; the record ends with a line in the log", None)

    def slow_readers(self) -> Outcome:
        with self._server("--max-running-requests", "64") as server:
            alone = median_seconds(server)
            readers = [half_request(server, whole=True) for _ in range(50)]
            beside = median_seconds(server)
            for reader in readers:
                reader.close()
            until(server.at_rest)
            server.terminate()
        return Outcome("50 streams that nobody reads", f"200 after {beside * 1e3:.0f} ms, {alone * 1e3:.0f} ms alone", None)

    def half_open(self) -> Outcome:
        with self._server() as server:
            connections = [half_request(server, whole=False) for _ in range(200)]
            seconds = median_seconds(server)
            server.process.send_signal(signal.SIGTERM)
            begin = time.monotonic()
            status = server.process.wait(90)
            ended = time.monotonic() - begin
            for connection in connections:
                connection.close()
        return Outcome(
            "200 requests of which half the body never comes",
            f"200 after {seconds * 1e3:.0f} ms; SIGTERM: status {status} after {ended:.0f} s",
            None,
        )

    def idle_connections(self) -> Outcome:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * IDLE), hard))
        try:
            with self._server() as server:
                connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(IDLE)]
                seconds = median_seconds(server)
                files = max(len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())), 0)
                for connection in connections:
                    connection.close()
                until(lambda: len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < 200)
                server.terminate()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return Outcome(f"{IDLE:,} idle connections ({files:,} descriptors)", f"200 after {seconds * 1e3:.0f} ms", None)


def served(server: Server) -> list[int]:
    """A short answer, which must come."""
    reply = httpx.post(server.url + "/generate", json=SHORT, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["output_ids"]
    return ids


def median_seconds(server: Server) -> float:
    """Of five short requests, one after the other."""
    times = []
    for _ in range(5):
        begin = time.monotonic()
        served(server)
        times.append(time.monotonic() - begin)
    return sorted(times)[2]


def half_request(server: Server, *, whole: bool) -> socket.socket:
    """A connection with a request for a long stream that is never read, or with half of a request."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    body = b'{"text": "a", "stream": true, "sampling_params": {"max_new_tokens": 800, "ignore_eos": true}}'
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.sendall(head + (body if whole else body[: len(body) // 2]))
    return connection


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    rows = [
        f"| {outcome.scenario} | {outcome.saw} | {'not interrupted' if outcome.seconds is None else f'{outcome.seconds:.1f} s'} |"
        for outcome in outcomes
    ]
    return "\n".join(["| what happens | what clients see | served again after |", "|---|---|---|", *rows])


def main() -> int:
    """Run all scenarios, or those whose name has a word in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a real model; default: the token oracle")
    parser.add_argument("--only", default="", help="part of a scenario's name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or oracle_folder(Path(folder) / "model")
        chaos = Chaos(model, "auto" if options.model else "oracle", Path(folder))
        print(table(chaos.run(options.only)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
