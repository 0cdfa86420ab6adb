"""RepeatLimit: a warning that repeats a thousand times a minute fills a disk and says no more than twenty of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 20  # records of one kind within a window
WINDOW = 60.0  # seconds
MAX_KINDS = 1000  # kinds that are kept in mind


@dataclass(slots=True)
class _Kind:
    begin: float
    count: int = 0


class RepeatLimit(logging.Filter):
    """A filter for handlers. Warnings and errors are of one kind if they share logger, level and text before its values are put in.

    The first record of a window tells how many of the one before were not written. What is below a warning always passes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key, now = (record.name, record.levelno, str(record.msg)), self._clock()
        kind = self._kinds.get(key)
        if kind is None or now - kind.begin >= WINDOW:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            left_out = max(kind.count - BURST, 0) if kind is not None else 0
            kind = self._kinds[key] = _Kind(now)
            if left_out:
                record.msg = f"{record.msg} ({left_out} more like this were not logged)"
        kind.count += 1
        return kind.count <= BURST


def limit_repeats() -> None:
    """Put the filter before every handler of the root logger."""
    repeats = RepeatLimit()
    for handler in logging.getLogger().handlers:
        handler.addFilter(repeats)
