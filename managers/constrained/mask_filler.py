"""MaskFiller: looks into grammars on a thread of its own, so that one that takes too long is left behind instead of waited for.

A library's call cannot be interrupted, but it lets other threads run. So the caller waits for each look until it has computed for
as long as the limit; the thread of one that computes longer ends by itself when the call returns, and another one goes on with what
is left. What counts is the processor time of that thread: on a busy machine a cheap look takes long, and is cheap all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
NO_LIMIT = 1e6  # seconds
PATIENCE = 60  # times the limit that a look may take which does not compute but stands still
SHORTEST_WAIT = 1e-3  # seconds


@dataclass(slots=True)
class _Job(Generic[T]):
    """Calls that one thread makes one after the other. What a thread that was left behind still yields is never looked at."""

    calls: list[Callable[[], T]]
    results: list[T] = field(default_factory=list)
    error: Exception | None = None
    clock: int | None = None  # counts the processor time of the thread that makes the calls
    computed: float = 0.0  # what it said when the call under way began
    begun: float = field(default_factory=time.monotonic)  # when that was
    left: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # of all that changes while the calls are made
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with self.lock:
            self._begin()
            self.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            for call in self.calls:
                result = call()
                with self.lock:
                    if self.left:
                        return
                    self.results.append(result)
                    self._begin()
        except Exception as error:  # for the thread that waits
            self.error = error
        finally:
            self.done.set()

    def _begin(self) -> None:
        self.computed = time.thread_time()
        self.begun = time.monotonic()

    def left_of(self, limit: float) -> float:
        """Seconds that the call under way may go on; 0 if it may not, which leaves the thread behind."""
        with self.lock:
            if len(self.results) == len(self.calls):
                return limit
            computed = 0.0 if self.clock is None else time.clock_gettime(self.clock) - self.computed
            left = min(limit - computed, PATIENCE * limit - (time.monotonic() - self.begun))
            self.left = left <= 0
            return max(left, 0.0)


class MaskFiller:
    """``run`` is for one thread at a time. limit: seconds of processor time that a call may take."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._queue: SimpleQueue[_Job[object] | None] | None = None

    def run(self, calls: list[Callable[[], T]]) -> list[T | None]:
        """What the calls return, in order; None in the place of one that took too long. Raises what a call raised."""
        results: list[T | None] = []
        while len(results) < len(calls):
            job = _Job(calls[len(results) :])
            self._submit(job)
            in_time = self._wait(job)
            results += job.results
            if job.error is not None:
                raise job.error
            if not in_time:
                results.append(None)
                self.close()
        return results

    def close(self) -> None:
        """Let the thread end when it has nothing more to do. Idempotent; a later ``run`` starts another one."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    def _wait(self, job: _Job[T]) -> bool:
        """False: a call takes too long, and is left behind."""
        wait = self._limit
        while not job.done.wait(max(wait, SHORTEST_WAIT)):
            wait = job.left_of(self._limit)
            if not wait:
                return False
        return True

    def _submit(self, job: _Job[T]) -> None:
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), daemon=True, name="masks").start()
        self._queue.put(job)  # type: ignore[arg-type]


def _serve(queue: SimpleQueue[_Job[object] | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
