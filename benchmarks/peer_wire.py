"""A small HTTP server in front of an engine that has none: POST /generate as Banyan's, streamed, and GET /health.

Standard library only: it runs in the engine's own environment.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol


class Engine(Protocol):
    """Continuous batching, turned by one thread."""

    def add(self, number: int, input_ids: list[int], max_new_tokens: int) -> None:
        """Take a request in."""

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        """One step: (request, its new ids, whether it has ended) for every request that has any."""

    def busy(self) -> bool:
        """True while a request has not ended."""


class _Driver:
    """The thread that turns the engine; everybody else talks to it through queues."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._incoming: queue.SimpleQueue[tuple[dict[str, Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._outgoing: dict[int, queue.SimpleQueue[Any]] = {}
        self._count = 0

    def submit(self, body: dict[str, Any]) -> queue.SimpleQueue[Any]:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._incoming.put((body, answers))
        return answers

    def run(self) -> None:
        while True:
            if not self._engine.busy():
                self._take(*self._incoming.get())
            while not self._incoming.empty():
                self._take(*self._incoming.get())
            for number, ids, ended in self._engine.step():
                self._outgoing[number].put((ids, ended))
                if ended:
                    del self._outgoing[number]

    def _take(self, body: dict[str, Any], answers: queue.SimpleQueue[Any]) -> None:
        self._count += 1
        self._outgoing[self._count] = answers
        self._engine.add(self._count, body["input_ids"], body["sampling_params"]["max_new_tokens"])


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # of 64 connections at once the usual 5 would refuse most
    daemon_threads = True


def serve(engine: Engine, port: int) -> None:
    """Until the process is ended."""
    driver = _Driver(engine)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answers = driver.submit(body)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            count, ended = 0, False
            try:
                while not ended:
                    ids, ended = answers.get()
                    count += len(ids)
                    meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": count}
                    meta["finish_reason"] = {"type": "length"} if ended else None
                    self._event(json.dumps({"output_ids": ids, "meta_info": meta}))
                self._event("[DONE]")
                self.wfile.write(b"0\r\n\r\n")
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def _event(self, data: str) -> None:
            event = f"data: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

        def log_message(self, *args: Any) -> None:
            pass

    server = _Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    driver.run()
