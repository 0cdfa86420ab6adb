"""SessionHolds: the KV that streaming sessions keep between their turns, as locks on paths of the prefix cache.

A hold is what the last finished turn of a session held of the cache. It lasts until a longer turn of the session finishes, so a
turn that is retracted or aborted leaves the history before it in place. Holds never stand in the way of a request that would
otherwise have the pool to itself: the scheduler drops them, oldest first, before it lets one wait.
"""

from __future__ import annotations

import numpy as np

from ..mem_cache.allocator import SlotAllocator
from ..mem_cache.prefix_cache import CacheHold, PrefixCache

NO_SLOTS = np.empty(0, np.int32)


class SessionHolds:
    """At most one hold per session, in the order in which their turns finished; together at most ``budget`` tokens.

    Prefixes that sessions share count once for each.
    """

    def __init__(self, cache: PrefixCache, allocator: SlotAllocator, budget: int) -> None:
        self.budget = budget
        self.num_tokens = 0
        self._cache = cache
        self._allocator = allocator
        self._holds: dict[str, CacheHold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def longest(self) -> int:
        """Tokens of the longest hold."""
        return max((hold.length for hold in self._holds.values()), default=0)

    def keep(self, session: str, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Take over what a finished turn holds; arguments as for PrefixCache.cache_finished_req.

        A turn that exceeds the budget by itself only leaves its KV to the cache; what the session held before stays.
        """
        self._cache.cache_unfinished_req(hold, token_ids, slots[: len(token_ids)])
        self._allocator.free(slots[hold.length :])
        if not 0 < hold.length <= self.budget:
            self._cache.release(hold, NO_SLOTS)
            return
        self.release(session)
        self._holds[session] = hold
        self.num_tokens += hold.length
        while self.num_tokens > self.budget:
            self.drop_oldest()

    def release(self, session: str) -> None:
        """A session ended, or gets a new hold. Unknown ones, whose hold was dropped, are no error."""
        hold = self._holds.pop(session, None)
        if hold is not None:
            self.num_tokens -= hold.length
            self._cache.release(hold, NO_SLOTS)

    def drop_oldest(self) -> bool:
        """Release the hold that was renewed least recently; False if there is none."""
        if not self._holds:
            return False
        self.release(next(iter(self._holds)))
        return True

    def clear(self) -> int:
        """Release all; says how many there were."""
        count = len(self._holds)
        while self.drop_oldest():
            pass
        return count

    def forget(self) -> None:
        """Forget all without unlocking: the cache has forgotten everything."""
        self._holds.clear()
        self.num_tokens = 0
