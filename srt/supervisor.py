"""Supervisor: starts the engine's processes again when one dies or hangs, as often as the budget allows."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ..managers.errors import BanyanError, EngineDeadError
from ..managers.processes import stacks
from ..managers.tokenizer_manager import TokenizerManager
from .launcher import Launched

log = logging.getLogger(__name__)

WINDOW = 3600.0  # seconds in which deaths are counted
MAX_POLL = 5.0  # seconds between two looks of the watchdog


class Supervisor:
    """``start`` begins to watch. give_up(error) is called on some thread when a death is the end, as any is before ``allow``."""

    def __init__(
        self,
        launched: Launched,
        tm: TokenizerManager,
        loop: asyncio.AbstractEventLoop,
        *,
        budget: int,
        watchdog: float,
        give_up: Callable[[EngineDeadError], None],
    ) -> None:
        """budget: restarts within an hour. watchdog: seconds of silence, or of one forward pass, after which a process hangs."""
        self._launched = launched
        self._tm = tm
        self._loop = loop
        self._budget = 0
        self._full_budget = budget
        self._watchdog = watchdog
        self._give_up = give_up
        self._deaths: list[float] = []
        self._restarting = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch for deaths, and for processes that hang."""
        self._launched.group.watch(self._died)
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def allow(self) -> None:
        """The engine has proved that it can serve: from now on a death need not be the end."""
        self._budget = self._full_budget

    def stop(self) -> None:
        """Start nothing again from now on."""
        self._stopped.set()

    def _died(self, error: EngineDeadError) -> None:
        if self._stopped.is_set():
            return
        now = time.monotonic()
        self._deaths = [when for when in self._deaths if now - when < WINDOW]
        if len(self._deaths) >= self._budget:
            self._give_up(error)
            return
        self._deaths.append(now)
        log.error("%s; starting again, %d of %d within an hour", error, len(self._deaths), self._budget)
        if error.detail:
            log.error("%s", error.detail.rstrip())
        threading.Thread(target=self._restart, args=(error,), name="restart", daemon=True).start()

    def _restart(self, error: EngineDeadError) -> None:
        with self._restarting:
            begin = time.monotonic()
            try:
                self._on_loop(self._tm.suspend())
                self._launched.restart()
                self._on_loop(self._tm.resume())
            except BanyanError as failure:
                if not self._stopped.is_set():
                    self._give_up(EngineDeadError(f"{error}; it could not be started again: {failure}", error.detail))
                return
            log.info("The engine serves again after %.1f s", time.monotonic() - begin)
        self._launched.group.rearm()

    def _on_loop(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # --- the watchdog

    def _look(self) -> None:
        while not self._stopped.wait(min(MAX_POLL, self._watchdog / 4)):
            reason = self._tm.hangs(self._watchdog)
            if reason and not self._tm.is_restarting:
                self._kill(reason)

    def _kill(self, reason: str) -> None:
        pids = self._launched.group.pids_by_name()
        log.error("watchdog: %s; the stacks of all processes follow", reason)
        for name, text in stacks.collect(self._launched.ipc.directory, {"main": os.getpid(), **pids}).items():
            log.error("stacks of the %s process:\n%s", name, text or "(none: it does not answer)")
        for name, pid in pids.items():
            if name.startswith("scheduler"):
                os.kill(pid, signal.SIGKILL)
        self._stopped.wait(self._watchdog / 4)  # for the death to be noticed
