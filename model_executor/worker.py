"""Runs steps in the order of their submission: on one worker thread, or inline. Torch-free."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """A call under way."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self, call: Callable[[], T]) -> None:
        """Execute the call and keep what it returned or raised."""
        try:
            self._value = call()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def done(self) -> bool:
        """True once wait would not block."""
        return self._finished.is_set()

    def wait(self) -> T:
        """Block until the call is over; returns its value or raises its exception."""
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Worker(Protocol):
    """Executes calls one after the other."""

    def submit(self, call: Callable[[], T]) -> Handle[T]:
        """Enqueue a call."""

    def close(self) -> None:
        """Finish what was submitted and stop. Idempotent."""


class InlineWorker:
    """submit runs the call before it returns."""

    def submit(self, call: Callable[[], T]) -> Handle[T]:
        handle: Handle[T] = Handle()
        handle.run(call)
        return handle

    def close(self) -> None:
        """Nothing to stop."""


class ThreadWorker:
    """One thread runs all calls: the only thread of its process that runs parallel regions of OpenMP, whose idle workers would
    otherwise spin once per calling thread."""

    def __init__(self, name: str = "forward") -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Handle[T]:
        handle: Handle[T] = Handle()
        self._calls.put(lambda: handle.run(call))
        return handle

    def close(self) -> None:
        """Finish what was submitted and stop. Idempotent."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
