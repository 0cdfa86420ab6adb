"""MaskFiller: looks into grammars on a thread of its own, so that one that takes too long is left behind instead of waited for.

A library's call cannot be interrupted, but it lets other threads run. So the caller waits for each look no longer than the limit;
the thread of one that takes longer ends by itself when the call returns, and another one goes on with what is left.
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


@dataclass(slots=True)
class _Job(Generic[T]):
    """Calls that one thread makes one after the other. What a thread that was left behind still yields is never looked at."""

    calls: list[Callable[[], T]]
    results: list[T] = field(default_factory=list)
    error: Exception | None = None
    begun: float = field(default_factory=time.monotonic)  # the call under way
    left: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # of results, begun and left
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            for call in self.calls:
                result = call()
                with self.lock:
                    if self.left:
                        return
                    self.results.append(result)
                    self.begun = time.monotonic()
        except Exception as error:  # for the thread that waits
            self.error = error
        finally:
            self.done.set()


class MaskFiller:
    """``run`` is for one thread at a time. limit: seconds that a call may take."""

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
        while not job.done.wait(max(job.begun + self._limit - time.monotonic(), 0.0)):
            with job.lock:
                job.left = len(job.results) < len(job.calls) and time.monotonic() >= job.begun + self._limit
            if job.left:
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
