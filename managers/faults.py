"""Faults on purpose, for tests: off unless the environment says otherwise.

BANYAN_FAULTS is a comma-separated list of name=number:
  retract_every=k      retract one request before every k-th decode step
  alloc_fail=p         an allocation of slots for decoding fails with probability p (drawn from a fixed sequence)
  step_fail=k          the k-th forward step raises
  scheduler_die=k      the scheduler raises when it decides for the k-th time
  detokenizer_delay=s  the detokenizer sleeps s seconds before each message
  detokenizer_die=k    the detokenizer exits at its k-th message
  load_fail=1          loading the model raises
"""

from __future__ import annotations

import os
import random

NAMES = ("retract_every", "alloc_fail", "step_fail", "scheduler_die", "detokenizer_delay", "detokenizer_die", "load_fail")


class Faults:
    """The faults to inject; ``Faults.from_env()`` in the process that has them."""

    def __init__(self, values: dict[str, float] | None = None) -> None:
        self._values = values or {}
        self._random = random.Random(0)
        self._counts: dict[str, int] = {}
        self._due: set[str] = set()

    @classmethod
    def from_env(cls) -> Faults:
        """Raises ValueError on an unknown name or a value that is no number."""
        values = {}
        for item in filter(None, os.environ.get("BANYAN_FAULTS", "").split(",")):
            name, _, number = item.partition("=")
            if name not in NAMES:
                raise ValueError(f"BANYAN_FAULTS: unknown fault {name!r}, known are {', '.join(NAMES)}")
            values[name] = float(number)
        return cls(values)

    @property
    def values(self) -> dict[str, float]:
        """All faults that are on."""
        return dict(self._values)

    def value(self, name: str) -> float:
        """The number given for a fault, 0 if it is off."""
        return self._values.get(name, 0.0)

    def draw(self, name: str) -> bool:
        """True with the fault's probability."""
        return name in self._values and self._random.random() < self._values[name]

    def every(self, name: str) -> bool:
        """True at every k-th call, and from there on until ``served``."""
        if name in self._due:
            return True
        if self._count(name) > 0 and self._counts[name] % int(self._values[name]) == 0:
            self._due.add(name)
        return name in self._due

    def served(self, name: str) -> None:
        """The fault that ``every`` announced was carried out."""
        self._due.discard(name)

    def at(self, name: str) -> bool:
        """True at the k-th call only."""
        return self._count(name) > 0 and self._counts[name] == int(self._values[name])

    def _count(self, name: str) -> int:
        if name not in self._values:
            return 0
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name]
