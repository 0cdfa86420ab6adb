"""Many runs on a bounded number of threads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from .waiting import Signal, threads

T = TypeVar("T")
BAR = 30
LOOK_AHEAD = 4  # results that may wait to be taken, per thread


def run_all(one: Callable[[int], T], count: int, *, num_threads: int, progress_bar: bool, bounded: bool) -> Generator[T]:
    """one(0), one(1), ...: the results in order, each as soon as it and all before it are there.

    bounded: threads wait while LOOK_AHEAD results each have not been taken. Work begins with the first ``next``. Closing the
    generator starts no further item. The first exception of ``one`` is raised in its place.
    """
    board = _Board(one, count, progress_bar)
    size = min(num_threads, count)
    board.limit = size * LOOK_AHEAD if bounded else count
    for _ in range(size):
        threads.start(board.work)
    try:
        for index in range(count):
            yield board.take(index)
    finally:
        board.stop()


class _Board:
    """What is to do and what is done."""

    def __init__(self, one: Callable[[int], Any], count: int, progress_bar: bool) -> None:
        self.limit = 0
        self._one = one
        self._count = count
        self._next = 0
        self._done: dict[int, tuple[Any, BaseException | None]] = {}
        self._num_taken = 0
        self._num_done = 0
        self._begin = time.monotonic()
        self._progress_bar = progress_bar
        self._signal = Signal()

    def work(self) -> None:
        """One thread's share."""
        while (index := self._claim()) is not None:
            result: tuple[Any, BaseException | None]
            try:
                result = self._one(index), None
            except BaseException as error:  # handed to whoever takes the result
                result = None, error
            with self._signal:
                self._done[index] = result
                self._num_done += 1
                if self._progress_bar:
                    self._show()
            self._signal.notify()

    def _claim(self) -> int | None:
        with self._signal:
            self._signal.wait(lambda: self._next >= self._count or self._next < self._num_taken + self.limit)
            if self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1

    def take(self, index: int) -> Any:
        """Wait for a result."""
        self._signal.wait(lambda: index in self._done)
        with self._signal:
            value, error = self._done.pop(index)
            self._num_taken += 1
        self._signal.notify()
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        """Start nothing more."""
        with self._signal:
            self._next = self._count
        self._signal.notify()

    def _show(self) -> None:
        seconds = time.monotonic() - self._begin
        filled = BAR * self._num_done // self._count
        line = f"\r[{'#' * filled}{'.' * (BAR - filled)}] {self._num_done}/{self._count} {seconds:.1f} s"
        print(line, end="\n" if self._num_done == self._count else "", file=sys.stderr, flush=True)
