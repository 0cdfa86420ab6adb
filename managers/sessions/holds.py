"""SessionHolds: the KV that streaming sessions keep between their turns, as locks on paths of the prefix cache.

A hold is what the last finished turn of a session held of the cache. It lasts until a longer turn of the session finishes, so a
turn that is retracted or aborted leaves the history before it in place.
"""

from __future__ import annotations

import numpy as np

from ...mem_cache.allocator import SlotAllocator
from ...mem_cache.prefix_cache import CacheHold, PrefixCache
from ..cache_holds import NO_SLOTS, CacheHolds


class SessionHolds(CacheHolds):
    """One hold per session, in the order in which their turns finished; beyond the budget the oldest go."""

    def __init__(self, cache: PrefixCache, allocator: SlotAllocator, budget: int) -> None:
        super().__init__(cache, budget)
        self._allocator = allocator

    def keep(self, session: str, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Take over what a finished turn holds; arguments as for PrefixCache.cache_finished_req.

        A turn that exceeds the budget by itself only leaves its KV to the cache; what the session held before stays.
        """
        self._cache.cache_unfinished_req(hold, token_ids, slots[: len(token_ids)])
        self._allocator.free(slots[hold.length :])
        if not 0 < hold.length <= self.budget:
            self._cache.release(hold, NO_SLOTS)
            return
        self.put(session, hold)
        while self.num_tokens > self.budget:
            self.drop_oldest()
