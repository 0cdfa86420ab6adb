"""CacheHolds: locks on paths of the prefix cache that outlive the request that made them, by owner and within a budget.

Sessions (``session_holds``) and pins (``pins``) keep theirs here. No such lock may stand in the way of a request that would
otherwise have the pool to itself: the scheduler drops them one by one before it lets one wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..mem_cache.prefix_cache import CacheHold, PrefixCache

NO_SLOTS = np.empty(0, np.int32)


class CacheHolds:
    """At most one hold per owner, in the order in which they were made; ``budget`` and ``num_tokens`` count tokens.

    Prefixes that several owners hold count once for each.
    """

    def __init__(self, cache: PrefixCache, budget: int) -> None:
        self.budget = budget
        self.num_tokens = 0
        self._cache = cache
        self._holds: dict[str, CacheHold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def holds(self) -> Iterable[CacheHold]:
        """All holds; for checks of the whole."""
        return self._holds.values()

    def put(self, owner: str, hold: CacheHold) -> None:
        """Take over a hold, in the place of the one that owner has."""
        self.release(owner)
        self._holds[owner] = hold
        self.num_tokens += hold.length

    def release(self, owner: str) -> None:
        """Unlock what owner holds. Unknown ones, whose hold was dropped, are no error."""
        hold = self._holds.pop(owner, None)
        if hold is not None:
            self.num_tokens -= hold.length
            self._cache.release(hold, NO_SLOTS)

    def drop_oldest(self) -> bool:
        """Release the hold that was made first; False if there is none."""
        if not self._holds:
            return False
        self.release(next(iter(self._holds)))
        return True

    def clear(self) -> int:
        """Release all; says how many there were."""
        count = len(self._holds)
        for owner in list(self._holds):
            self.release(owner)
        return count

    def forget(self) -> None:
        """Forget all without unlocking: the cache has forgotten everything."""
        self._holds.clear()
        self.num_tokens = 0
