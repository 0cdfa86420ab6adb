"""Waiting for what another thread does: from a thread, or from any asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class Signal:
    """A condition. Hold it (``with signal:``) while changing what waiters look at, then ``notify``."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._wakers: set[Callable[[], None]] = set()

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *_: object) -> None:
        self._condition.release()

    def notify(self) -> None:
        """Something has changed."""
        with self._condition:
            self._condition.notify_all()
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def wait(self, predicate: Callable[[], object]) -> None:
        """Block until the predicate holds; it runs with the signal held."""
        with self._condition:
            self._condition.wait_for(predicate)

    async def wait_async(self, predicate: Callable[[], object]) -> None:
        """``wait`` for coroutines."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(changed.set)

        with self._condition:
            self._wakers.add(wake)
        try:
            while True:
                changed.clear()
                with self._condition:
                    if predicate():
                        return
                await changed.wait()
        finally:
            with self._condition:
                self._wakers.discard(wake)


class Threads:
    """Daemon threads, reused while they are warm. There is always one for a new task, so tasks may wait for each other."""

    IDLE_SECONDS = 2.0

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._tasks: list[Callable[[], None]] = []
        self._num_idle = 0

    def start(self, task: Callable[[], None]) -> None:
        """Run a task, which must not raise, on a thread of its own."""
        with self._condition:
            if self._num_idle > len(self._tasks):
                self._tasks.append(task)
                self._condition.notify()
                return
        threading.Thread(target=self._work, args=(task,), name="banyan-lang", daemon=True).start()

    def _work(self, task: Callable[[], None] | None) -> None:
        while task is not None:
            task()
            task = self._next()

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            self._num_idle += 1
            self._condition.wait_for(lambda: self._tasks, self.IDLE_SECONDS)
            self._num_idle -= 1
            return self._tasks.pop() if self._tasks else None


threads = Threads()
