"""PrefixWatch agrees with a fresh lookup after any change of the tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.mem_cache.allocator import SlotAllocator
from banyan.mem_cache.prefix_cache import CacheHold, CacheKey
from banyan.mem_cache.radix_cache import RadixCache

KEYS = (CacheKey(), CacheKey(extra_key="x"))


def finish(cache: RadixCache, allocator: SlotAllocator, key: CacheKey, ids: np.ndarray) -> None:
    hold, prefix = cache.lock_prefix(key, ids)
    new = allocator.alloc_extend(np.array([len(prefix)]), np.array([len(ids)]), prefix[-1:] if len(prefix) else np.array([0]))
    if new is None:
        cache.release(hold, prefix)
        return
    cache.cache_finished_req(hold, ids, np.concatenate([prefix, new]))


def test_new_children_concern_only_those_that_wanted_them() -> None:
    allocator = SlotAllocator(100, 1)
    cache = RadixCache(allocator)
    watch = cache.watch()
    assert watch is cache.watch()
    for name in range(10):
        assert watch.add(name, KEYS[0], np.array([name, 1, 2])) == 0
    finish(cache, allocator, KEYS[0], np.array([3, 1, 9]))
    assert watch.refresh() == {3: 2}
    assert watch.refresh() == {}
    finish(cache, allocator, KEYS[1], np.array([4, 1, 2]))
    assert watch.refresh() == {}
    finish(cache, allocator, KEYS[0], np.array([3, 1, 2]))
    assert watch.refresh() == {3: 3}
    cache.evict(100)
    assert watch.refresh() == {3: 0}
    watch.discard(3)
    finish(cache, allocator, KEYS[0], np.array([3, 1, 2]))
    assert watch.refresh() == {}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 4]),
    st.lists(
        st.tuples(
            st.sampled_from(["add", "discard", "finish", "evict", "reset", "refresh"]),
            st.integers(0, 1),
            st.integers(0, 40),
            st.integers(1, 12),
        ),
        max_size=60,
    ),
)
def test_agrees_with_a_fresh_lookup(page: int, actions: Any) -> None:
    allocator = SlotAllocator(64 * page, page)
    cache = RadixCache(allocator)
    watch = cache.watch()
    lengths: dict[int, int] = {}
    names: dict[int, tuple[CacheKey, np.ndarray]] = {}
    for i, (action, which, seed, length) in enumerate(actions):
        key, ids = KEYS[which], np.random.default_rng(seed % 7).integers(0, 2, 12 * page)[: length * page]
        if action == "add":
            names[i] = (key, ids)
            lengths[i] = watch.add(i, key, ids)
        elif action == "discard" and names:
            name = sorted(names)[seed % len(names)]
            watch.discard(name)
            del names[name], lengths[name]
        elif action == "finish":
            finish(cache, allocator, key, ids)
        elif action == "evict":
            cache.evict(length * page)
        elif action == "reset":
            cache.reset()
        else:
            lengths.update(watch.refresh())
            assert lengths == {name: cache.match_prefix(*names[name]).length for name in names}
    lengths.update(watch.refresh())
    assert lengths == {name: cache.match_prefix(*names[name]).length for name in names}
    for name in list(names):
        watch.discard(name)
    assert not watch._at_end
    assert not watch._inside


def test_a_hold_is_not_needed() -> None:
    with pytest.raises(KeyError):
        RadixCache(SlotAllocator(4, 1)).watch().discard(1)
    assert CacheHold(KEYS[0]).length == 0
