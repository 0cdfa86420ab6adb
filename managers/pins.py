"""Pins: prompts that stay in the prefix cache for a time, because the request that brought them asked for it."""

from __future__ import annotations

import hashlib

import numpy as np

from ..mem_cache.prefix_cache import CacheKey, PrefixCache
from .cache_holds import CacheHolds
from .deadlines import Deadlines

KIND = "pin"


class Pins(CacheHolds):
    """One hold per prompt and namespace. Time is that of the newest Tick; the pin that expires first goes first."""

    def __init__(self, cache: PrefixCache, budget: int) -> None:
        super().__init__(cache, budget)
        self._deadlines = Deadlines()
        self._until: dict[str, float] = {}

    def pin(self, key: CacheKey, prompt: np.ndarray, until: float) -> int:
        """Lock what the cache holds of a prompt; returns how many tokens that are, 0 if the budget has no room for them.

        A prompt that is pinned already stays so until the later of the two times, at no further cost.
        """
        owner = hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=16, person=b"pin").hexdigest() + repr(tuple(key))
        held = self._holds.get(owner)
        if held is None:
            if self.num_tokens + self._cache.match_prefix(key, prompt).length > self.budget:
                return 0
            held = self._cache.hold_prefix(key, prompt)
            if not held.length:
                return 0
            self.put(owner, held)
        self._until[owner] = max(until, self._until.get(owner, until))
        self._deadlines.arm(owner, KIND, self._until[owner])
        return held.length

    def expire(self, now: float) -> None:
        """It is ``now``: release the pins whose time is over."""
        while (due := self._deadlines.pop_due(now)) is not None:
            self.release(due[0])

    def release(self, owner: str) -> None:
        super().release(owner)
        self._until.pop(owner, None)
        self._deadlines.disarm(owner, KIND)

    def drop_oldest(self) -> bool:
        """Release the pin that would expire first; False if there is none."""
        if not len(self):
            return False
        due = self._deadlines.pop_due(self._deadlines.next_due())
        if due is not None:
            self.release(due[0])
        return due is not None

    def forget(self) -> None:
        super().forget()
        self._until.clear()
        self._deadlines = Deadlines()
