"""RadixCache: the prefix cache as a radix tree over the slots of an allocator.

Of a request's row, [0, hold.length) belongs to the tree and is locked, the rest belongs to the request. A request's lock sits on
one node, the end of its path; giving tokens to the tree moves it further down, so re-caching costs no more than what is new:

    row:  0 ------ hold.length ------ start + known ------ aligned ------ len(slots)
          | tree's, locked | known meanwhile: | new: becomes a  | unaligned tail, |
          |                | own slots freed  | leaf            | unused slots    |
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .allocator import SlotAllocator
from .eviction import make_order
from .prefix_cache import CacheHold, CacheKey, PrefixMatch
from .prefix_watch import PrefixWatch
from .radix_tree import TOKEN_BYTES, Node, RadixTree

# Of a leaf that is too long for the demand only the tail goes, but at least this fraction of it: each cut copies the rest.
_MIN_CUT = 8


class RadixCache:
    """A PrefixCache; see the protocol for the contract of its methods.

    Counters since the start: ``query_tokens`` (asked of lock_prefix), ``hit_tokens`` (found by it), ``evicted_tokens``.
    """

    def __init__(self, allocator: SlotAllocator, *, eviction_policy: str = "lru") -> None:
        self.page_size = allocator.page_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self.evicted_tokens = 0
        self._allocator = allocator
        self._policy = eviction_policy
        self._tree = RadixTree(self.page_size, make_order(eviction_policy))

    @property
    def evictable_size(self) -> int:
        """Tokens that evict could free now."""
        return self._tree.evictable_size

    @property
    def protected_size(self) -> int:
        """Tokens held by the cache and locked by live requests."""
        return self._tree.protected_size

    @property
    def total_size(self) -> int:
        """Tokens held by the cache."""
        return self._tree.evictable_size + self._tree.protected_size

    @property
    def tree(self) -> RadixTree:
        """What is cached, for reports; not to be changed."""
        return self._tree

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, roots not counted."""
        return self._tree.num_nodes

    def match_prefix(self, key: CacheKey, token_ids: np.ndarray) -> PrefixMatch:
        """Longest cached prefix of token_ids. Pure: changes neither the tree nor the eviction order."""
        if key not in self._tree.roots:
            return PrefixMatch(0, 0)
        return self._tree.match(key, self._tree.data_of(token_ids))

    def lock_prefix(self, key: CacheKey, token_ids: np.ndarray) -> tuple[CacheHold, np.ndarray]:
        """Match, mark as just used, lock; the hold and the slots int32 [hold.length] of the matched prefix."""
        self.query_tokens += len(token_ids)
        root = self._tree.roots.get(key)
        if root is None:
            return CacheHold(key), np.empty(0, np.int32)
        end, slots = self._tree.descend(root, self._tree.data_of(token_ids))
        self.hit_tokens += len(slots)
        return CacheHold(key, len(slots), None if end is root else end), slots

    def hold_prefix(self, key: CacheKey, token_ids: np.ndarray) -> CacheHold:
        """Match and lock, for an owner that is no request: no counter moves."""
        root = self._tree.roots.get(key)
        if root is None:
            return CacheHold(key)
        end, slots = self._tree.descend(root, self._tree.data_of(token_ids), hits=0)
        return CacheHold(key, len(slots), None if end is root else end)

    def held_tokens(self, holds: Iterable[CacheHold]) -> int:
        """Tokens that these holds lock, each counted once; O(length of their paths in nodes)."""
        sizes: dict[int, int] = {}
        for hold in holds:
            at = hold.node
            while at is not None and at.parent is not None and id(at) not in sizes:
                sizes[id(at)] = len(at.slots)
                at = at.parent
        return sum(sizes.values())

    def cache_unfinished_req(self, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Give the KV of a request that goes on to the cache; writes the cache's slots into ``slots`` where it knew the tokens."""
        if len(token_ids) != len(slots):
            raise ValueError(f"{len(token_ids)} tokens in {len(slots)} slots")
        start = hold.length
        known = self._insert(hold, token_ids, slots)
        duplicates = slots[start : start + len(known)]
        self._allocator.free(duplicates)
        duplicates[:] = known

    def cache_finished_req(self, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Give the KV of a finished request to the cache, free duplicates and everything beyond, unlock."""
        if len(token_ids) > len(slots):
            raise ValueError(f"{len(token_ids)} tokens in {len(slots)} slots")
        start = hold.length
        known = self._insert(hold, token_ids, slots)
        with self._allocator.free_group():
            self._allocator.free(slots[start : start + len(known)])
            self._allocator.free(slots[hold.length :])
        self._unlock(hold)

    def release(self, hold: CacheHold, slots: np.ndarray) -> None:
        """Drop a request without remembering it: free slots[hold.length:], unlock the hold."""
        self._allocator.free(slots[hold.length :])
        self._unlock(hold)

    def evict(self, num_tokens: int) -> int:
        """Free at least num_tokens unlocked tokens if there are that many; returns how many were freed.

        Of the last leaf taken only the tail goes where that is enough; the rest stays next in the order.
        """
        freed: list[np.ndarray] = []
        missing = num_tokens
        while missing > 0 and (leaf := self._tree.victim()) is not None:
            wanted = max(missing, len(leaf.slots) // _MIN_CUT)
            slots = self._tree.cut(leaf, -(-wanted // self.page_size) * self.page_size)
            freed.append(slots)
            missing -= len(slots)
        if not freed:
            return 0
        self._allocator.free(np.concatenate(freed))
        self.evicted_tokens += num_tokens - missing
        return num_tokens - missing

    def reset(self) -> None:
        """Forget everything and free its slots. Raises RuntimeError if anything is locked."""
        if self._tree.protected_size:
            raise RuntimeError(f"reset: {self._tree.protected_size} tokens are locked by live requests")
        slots = [node.slots for node in self._tree.nodes()]
        self.forget()
        if slots:
            self._allocator.free(np.concatenate(slots))

    def forget(self) -> None:
        """Forget everything, locked or not, and free nothing: for a caller that starts the allocator anew."""
        observer = self._tree.observer
        self._tree = RadixTree(self.page_size, make_order(self._policy))
        if isinstance(observer, PrefixWatch):
            observer.rebind(self._tree)

    def watch(self) -> PrefixWatch:
        """The one PrefixWatch of this cache, made at the first call."""
        observer = self._tree.observer
        return observer if isinstance(observer, PrefixWatch) else PrefixWatch(self._tree)

    def check(self) -> None:
        """Verify every invariant of tree, order and slots; O(size of the tree). Raises RuntimeError with a description."""
        self._tree.check()
        parts = [node.slots for node in self._tree.nodes()]
        if not parts:
            return
        slots = np.concatenate(parts)
        pages = slots.reshape(-1, self.page_size)
        heads = pages[:, 0]
        if bool((heads % self.page_size).any()) or bool((pages - heads[:, None] != np.arange(self.page_size)).any()):
            raise RuntimeError("a page of tokens does not lie in one page of slots")
        if heads.min() < self.page_size or heads.max() > self._allocator.num_slots:
            raise RuntimeError("the tree holds slots outside the pool")
        if len(np.unique(heads)) != len(heads):
            raise RuntimeError("the tree holds a slot twice")
        if bool(self._allocator.is_free(heads).any()):
            raise RuntimeError("the tree holds a free slot")

    def _insert(self, hold: CacheHold, token_ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Give the whole pages of token_ids[hold.length:] to the tree and move the hold to their end.

        Returns the tree's slots of the first of these tokens, those that it knew already.
        """
        start = hold.length
        if len(token_ids) < start:
            raise ValueError(f"{len(token_ids)} tokens, but the hold covers {start}")
        data = self._tree.data_of(token_ids, start)
        if not data:
            return np.empty(0, np.int32)
        top: Node = hold.node if hold.node is not None else self._tree.root_of(hold.key)
        end, known = self._tree.descend(top, data)
        aligned = len(token_ids) // self.page_size * self.page_size
        if start + len(known) < aligned:
            rest = data[len(known) * TOKEN_BYTES :]
            end = self._tree.attach(end, rest, slots[start + len(known) : aligned])
        hold.node, hold.length = end, aligned
        return known

    def _unlock(self, hold: CacheHold) -> None:
        if hold.node is not None:
            self._tree.unlock(hold.node, hold.priority)
        hold.node, hold.length = None, 0
