"""The seam between the scheduler and whatever remembers the KV of earlier prompts.

Words: a *slot* is the place of one token's K and V in the pool; a request's *row* lists its slots in order.
All lengths are in tokens. Every slot array is int32. With page size p, everything the cache owns is a multiple of p.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from .allocator import SlotAllocator


class CacheKey(NamedTuple):
    """What must agree, besides the tokens, before two requests may share KV. Typed: never joined into one string."""

    adapter: str = ""
    weight_version: str = "default"
    extra_key: str = ""
    cache_salt: str = ""
    embeds: str = ""  # digest of the embeddings that are the prompt


class PrefixMatch(NamedTuple):
    """Result of a read-only lookup.

    length: matched tokens (a multiple of the page size).
    pinned: how many of these tokens are evictable now, so would stop being evictable if the match were locked.
    """

    length: int
    pinned: int


@dataclass(slots=True)
class CacheHold:
    """What one live request holds of the cache: the first ``length`` slots of its row belong to the cache and are locked.

    ``node`` is the cache's own handle (None when nothing is held). ``priority`` may be set by the owner of the request: what
    it held has at least this priority afterwards, which only the eviction policy "priority" reads.
    """

    key: CacheKey
    length: int = 0
    node: Any = None
    priority: int = 0


class PrefixCache(Protocol):
    """Remembers which slots hold which tokens. Never sees a request: token ids, slots and a CacheHold only."""

    page_size: int

    def match_prefix(self, key: CacheKey, token_ids: np.ndarray) -> PrefixMatch:
        """Longest cached prefix of token_ids. Pure: changes neither the tree nor the eviction order."""

    def lock_prefix(self, key: CacheKey, token_ids: np.ndarray) -> tuple[CacheHold, np.ndarray]:
        """Match, mark as just used, lock, and return the hold with the slots [hold.length] of the matched prefix."""

    def hold_prefix(self, key: CacheKey, token_ids: np.ndarray) -> CacheHold:
        """Match and lock, for an owner that is no request: no counter moves."""

    def held_tokens(self, holds: Iterable[CacheHold]) -> int:
        """Tokens that these holds lock, each counted once."""

    def cache_unfinished_req(self, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Give the KV of a request that goes on to the cache.

        token_ids and slots have the same length: the tokens whose KV is computed. ``slots`` is a writable view of the
        request's row. Where the cache already held tokens beyond hold.length, the request's own duplicates are freed
        and the cache's slots are written into ``slots``. Afterwards hold covers the page-aligned part, locked.
        """

    def cache_finished_req(self, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Give the KV of a finished request to the cache, free duplicates and everything beyond, unlock.

        ``slots`` are all the slots of the row, at least as many as token_ids (the tokens whose KV is valid); they must
        not be used afterwards.
        """

    def release(self, hold: CacheHold, slots: np.ndarray) -> None:
        """Drop a request without remembering it: free slots[hold.length:], unlock the hold."""

    def evict(self, num_tokens: int) -> int:
        """Free at least num_tokens unlocked tokens if there are that many; returns how many were freed."""

    def reset(self) -> None:
        """Forget everything and free its slots. Raises RuntimeError if anything is locked."""

    def forget(self) -> None:
        """Forget everything, locked or not, and free nothing: for a caller that starts the allocator anew."""

    @property
    def evictable_size(self) -> int:
        """Tokens that evict could free now."""

    @property
    def protected_size(self) -> int:
        """Tokens held by the cache and locked by live requests."""


class NoPrefixCache:
    """The PrefixCache that remembers nothing: never matches, holds nothing, and a finished request's slots are freed."""

    def __init__(self, allocator: SlotAllocator) -> None:
        self.page_size = allocator.page_size
        self._allocator = allocator

    def match_prefix(self, key: CacheKey, token_ids: np.ndarray) -> PrefixMatch:
        """No match."""
        return PrefixMatch(0, 0)

    def lock_prefix(self, key: CacheKey, token_ids: np.ndarray) -> tuple[CacheHold, np.ndarray]:
        """An empty hold and no slots."""
        return CacheHold(key), np.empty(0, np.int32)

    def hold_prefix(self, key: CacheKey, token_ids: np.ndarray) -> CacheHold:
        """An empty hold."""
        return CacheHold(key)

    def held_tokens(self, holds: Iterable[CacheHold]) -> int:
        """Always 0."""
        return 0

    def cache_unfinished_req(self, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Nothing: the request keeps its slots."""

    def cache_finished_req(self, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Free all slots of the row."""
        self._allocator.free(slots)

    def release(self, hold: CacheHold, slots: np.ndarray) -> None:
        """Free all slots of the row."""
        self._allocator.free(slots)

    def evict(self, num_tokens: int) -> int:
        """Nothing to evict."""
        return 0

    def reset(self) -> None:
        """Nothing to forget."""

    def forget(self) -> None:
        """Nothing to forget."""

    @property
    def evictable_size(self) -> int:
        """Always 0."""
        return 0

    @property
    def protected_size(self) -> int:
        """Always 0."""
        return 0
