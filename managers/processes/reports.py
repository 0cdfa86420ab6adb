"""What a child process tells its parent, in JSON lines on the pipe that it inherited."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NoReturn

import msgspec


class Reports:
    """The child's end of the pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, payload: dict[str, Any]) -> None:
        """The child is ready."""
        self._write({"status": "ready", "payload": payload})

    def error(self, message: str, traceback: str = "") -> None:
        """Why the child is about to end."""
        self._write({"status": "error", "message": message, "traceback": traceback})

    def fatal(self, message: str) -> NoReturn:
        """Report an error and end the process now, from any thread, whatever the others wait for."""
        self.error(message)
        leave(1)

    def _write(self, report: dict[str, Any]) -> None:
        data = msgspec.json.encode(report) + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


def leave(status: int) -> NoReturn:
    """Exit without waiting for threads or atexit hooks of libraries: all that has to be flushed was."""
    logging.shutdown()
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            file.flush()
    os._exit(status)
