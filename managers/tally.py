"""Counters and histograms as plain numbers. Nothing here raises.

A value that is negative or no number is taken as 0, and counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Labels = tuple[str, ...]


@dataclass(slots=True)
class Clamped:
    """How many values were not what they should be."""

    count: int = 0

    def sane(self, value: float) -> float:
        """The value if it is finite and not negative, else 0."""
        if math.isfinite(value) and value >= 0:
            return value
        self.count += 1
        return 0.0


@dataclass(slots=True)
class Counter:
    """Totals by label values."""

    clamped: Clamped
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, value: float, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + self.clamped.sane(value)


@dataclass(slots=True)
class Series:
    """One histogram: observations per bucket (the last one is open), and their sum."""

    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class Histogram:
    """Distributions by label values; ``bounds`` are the upper bounds of the buckets, ascending."""

    clamped: Clamped
    bounds: Sequence[float]
    series: dict[Labels, Series] = field(default_factory=dict)

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Enter a value, ``times`` times."""
        value = self.clamped.sane(value)
        series = self.series.get(labels)
        if series is None:
            series = self.series[labels] = Series([0] * (len(self.bounds) + 1))
        series.counts[bisect_left(self.bounds, value)] += times
        series.total += value * times

    def totals(self, name: str) -> dict[str, float]:
        """One without labels as counters, which can be summed over replicas and restarts; ``of_totals`` reads them."""
        series = self.series.get((), Series([0] * (len(self.bounds) + 1)))
        return {f"{name} {index}": float(count) for index, count in enumerate(series.counts)} | {f"{name} sum": series.total}

    @classmethod
    def of_totals(cls, name: str, bounds: Sequence[float], total: Callable[[str], float]) -> Histogram:
        """The histogram whose ``totals`` are told by ``total``."""
        counts = [round(total(f"{name} {index}")) for index in range(len(bounds) + 1)]
        return cls(Clamped(), bounds, {(): Series(counts, total(f"{name} sum"))})
