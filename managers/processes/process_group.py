"""The parent's side of child processes: start them together, notice a death at once, stop and reap them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import EngineDeadError, StartError

log = logging.getLogger(__name__)

DEATH_POLL = 500  # milliseconds; a closed pipe is noticed at once, a dead child whose pipe a process of its own holds this often
TERMINATE_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
KILL_GRACE = 10.0  # seconds to wait for the kernel after SIGKILL
# Variables that libraries read when they are imported, so that the parent must set them.
ENVIRONMENT = {"scheduler": {"THP_MEM_ALLOC_ENABLE": "1"}, "detokenizer": {"OMP_NUM_THREADS": "1"}}


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. ``command`` is the command line before ``--report-fd``; empty: managers.process with the kind, or the name."""

    name: str
    config: Any  # a msgspec.Struct
    command: list[str] = []
    kind: str = ""

    @property
    def role(self) -> str:
        """The kind of process that it is."""
        return self.kind or self.name

    def argv(self) -> list[str]:
        # -P: a file in the user's working directory must not shadow a module that the child imports
        return self.command or [sys.executable, "-P", "-m", "banyan.managers.processes.process", self.role]


class Report(msgspec.Struct):
    """One line of a child's report pipe."""

    status: str
    payload: dict[str, Any] = {}
    message: str = ""
    traceback: str = ""


class ChildProcess:
    """One child and the thread that reads its reports until it is dead and reaped.

    ``on_change`` is called on that thread after each report and at the end.
    """

    def __init__(self, spec: ChildSpec, on_change: Callable[[], None]) -> None:
        self.name = spec.name
        self.ready: Report | None = None
        self.error: Report | None = None
        self.dead = False
        self._on_change = on_change
        stdin_read, self._stdin = os.pipe()
        self._reports, report_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*spec.argv(), "--report-fd", str(report_fd)],
                stdin=stdin_read,
                pass_fds=(report_fd,),
                env={**os.environ, **ENVIRONMENT.get(spec.role, {})},
            )
        except OSError as error:
            os.close(self._stdin)
            os.close(self._reports)
            raise StartError(f"cannot start the {spec.name} process: {error}") from None
        finally:
            os.close(stdin_read)
            os.close(report_fd)
        with contextlib.suppress(BrokenPipeError):  # dead already: the watcher tells
            os.write(self._stdin, msgspec.json.encode(spec.config) + b"\n")
        self._thread = threading.Thread(target=self._watch, name=f"watch-{spec.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal, unless the child is dead (its pid may be another's by then)."""
        self._process.send_signal(number)

    def join(self, timeout: float) -> bool:
        """Wait until the child is dead and reaped; says whether it is."""
        if threading.current_thread() is not self._thread:  # else: called by on_change
            self._thread.join(timeout)
        return self.dead

    @property
    def ended_well(self) -> bool:
        """It is dead, by itself and with status 0."""
        return self.dead and self.error is None and self._process.returncode == 0

    def cause_of_death(self) -> str:
        """One line."""
        if self.error is not None:
            return self.error.message
        status = self._process.returncode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"exited with status {status}"

    @property
    def traceback(self) -> str:
        return self.error.traceback if self.error is not None else ""

    def _watch(self) -> None:
        poll = select.poll()  # select() has no place for descriptors above 1023
        poll.register(self._reports, select.POLLIN)
        rest, open_ = b"", True
        while open_:
            gone = self._process.poll() is not None
            if not poll.poll(0 if gone else DEATH_POLL):
                open_ = not gone
                continue
            data = os.read(self._reports, 1 << 16)
            open_ = bool(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line)
        self._process.wait()
        os.close(self._reports)
        os.close(self._stdin)
        self.dead = True
        self._on_change()

    def _take(self, line: bytes) -> None:
        report = msgspec.json.decode(line, type=Report)
        if report.status == "ready":
            self.ready = report
        else:
            self.error = report
        self._on_change()


class ProcessGroup:
    """The children of one engine. Stops only what it started, and only from the process that started it."""

    def __init__(self) -> None:
        self.children: list[ChildProcess] = []
        self._changed = threading.Condition()
        self._owner = os.getpid()
        self._stopping = False
        self._on_death: Callable[[EngineDeadError], None] | None = None
        self._told = False

    def start(
        self, specs: list[ChildSpec], timeout: float, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, Any]]:
        """Start all, call ``meanwhile``, and wait until all are ready; the payloads of their reports by name.

        Raises StartError, with the traceback that a child left, and what ``meanwhile`` raises, after everything was stopped again.
        """
        deadline = time.monotonic() + timeout
        try:
            for spec in specs:
                self.children.append(ChildProcess(spec, self._change))
                if self._stopping:
                    raise StartError("stopped")
            meanwhile()
            self._wait_ready(deadline, timeout)
        except BaseException:
            self.stop(0)
            raise
        return {child.name: child.ready.payload for child in self.children if child.ready is not None}

    def _wait_ready(self, deadline: float, timeout: float) -> None:
        with self._changed:
            while True:
                for child in self.children:
                    if child.dead:
                        raise StartError(f"the {child.name} failed to start: {child.cause_of_death()}", child.traceback)
                late = [child.name for child in self.children if child.ready is None]
                if not late:
                    return
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise StartError(f"the {' and the '.join(late)} did not get ready within {timeout:.0f} s")

    def restart(self, specs: list[ChildSpec], timeout: float) -> dict[str, dict[str, Any]]:
        """Kill what is left, reap all, and start again. Deaths are told again once ``rearm`` was called. Raises StartError."""
        for child in self.children:
            if not child.dead:
                child.signal(signal.SIGKILL)
        self._join(KILL_GRACE)
        self.children.clear()
        return self.start(specs, timeout)

    def rearm(self) -> None:
        """After ``restart``: tell of the next death, at once if there was one meanwhile."""
        self._told = False
        self._change()

    def watch(self, on_death: Callable[[EngineDeadError], None]) -> None:
        """Call ``on_death`` once, on some thread, when a child dies without having been stopped; at once if one is dead already."""
        self._on_death = on_death
        self._change()

    def _change(self) -> None:
        with self._changed:
            self._changed.notify_all()
            dead = next((child for child in self.children if child.dead), None)
            if dead is None or self._stopping or self._told or self._on_death is None:
                return
            self._told = True
        self._on_death(EngineDeadError(f"the {dead.name} process died: {dead.cause_of_death()}", dead.traceback))

    @property
    def owned(self) -> bool:
        """False in a process that was forked from the one that made the group."""
        return os.getpid() == self._owner

    def pids(self) -> list[int]:
        """Pids of the children that live."""
        return [child.pid for child in self.children if not child.dead]

    def pids_by_name(self) -> dict[str, int]:
        """Pids of the children that live, by name."""
        return {child.name: child.pid for child in self.children if not child.dead}

    def stop(self, timeout: float) -> None:
        """Give the children ``timeout`` seconds to leave by themselves, then terminate, then kill; return when all are reaped.

        Idempotent. Does nothing in a process forked from the owner.
        """
        if not self.owned:
            return
        with self._changed:
            self._stopping = True
        self._join(timeout)
        for number, grace in ((signal.SIGTERM, TERMINATE_GRACE), (signal.SIGKILL, KILL_GRACE)):
            for child in self.children:
                if not child.dead:
                    child.signal(number)
            self._join(grace)
        for child in self.children:
            if not child.dead:
                log.error("the %s process %d did not die", child.name, child.pid)

    def _join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for child in self.children:
            child.join(max(0.0, deadline - time.monotonic()))
