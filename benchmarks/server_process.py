"""A server of this project as a child process, for the time of a benchmark."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

STOP_SECONDS = 90.0
LOG_LINES = 20


class ServerError(Exception):
    """The server did not start."""


@contextlib.contextmanager
def running_server(model_path: str, options: Sequence[str], *, start_timeout: float) -> Iterator[str]:
    """Base URL of ``banyan serve`` on a free port of this machine, ready to serve. Raises ServerError with the end of its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "banyan", "serve", "--model-path", model_path, "--port", str(port), *options]
    with tempfile.TemporaryDirectory(prefix="banyan-bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            _wait_ready(process, url, start_timeout, log)
            yield url
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, timeout: float, log: Path) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if (status := process.poll()) is not None:
            raise ServerError(f"the server ended with status {status}:\n{_tail(log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/readyz", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise ServerError(f"the server was not ready after {timeout:.0f} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
