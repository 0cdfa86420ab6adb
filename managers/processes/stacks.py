"""Stacks of all threads of all processes, on demand.

A signal makes a process write its own into a file, even in the middle of C code.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

SIGNAL = signal.SIGUSR2
WAIT = 2.0  # seconds that a process gets to write
SETTLED = 0.1  # seconds without growth after which a file is complete


def install(directory: str) -> None:
    """Write the stacks of this process to a file in the engine's private directory whenever the signal comes."""
    file = open(path_of(directory, os.getpid()), "a", encoding="utf-8")  # noqa: SIM115  open as long as the process
    faulthandler.register(SIGNAL, file=file, all_threads=True)


def path_of(directory: str, pid: int) -> Path:
    """The file of a process."""
    return Path(directory) / f"stacks-{pid}"


def collect(directory: str, pids: Mapping[str, int]) -> dict[str, str]:
    """The stacks of the processes by name; what a process did not write in time is empty. Blocks for at most WAIT seconds."""
    paths = {name: path_of(directory, pid) for name, pid in pids.items()}
    starts = {name: _size(path) for name, path in paths.items()}
    for name, pid in pids.items():
        if paths[name].exists():  # without a handler the signal would end it
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + WAIT
    sizes: dict[str, int] = {}
    while time.monotonic() < deadline:
        time.sleep(SETTLED)
        now = {name: _size(path) for name, path in paths.items()}
        if now == sizes and all(now[name] > starts[name] for name in paths):
            break
        sizes = now
    return {name: _read(path, starts[name]) for name, path in paths.items()}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, start: int) -> str:
    if not path.exists():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        file.seek(start)
        return file.read()
