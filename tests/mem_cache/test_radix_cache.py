"""RadixCache by example: the corner cases of match, dedup, tails, locks, keys, eviction and reset."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from banyan.mem_cache.allocator import SlotAllocator
from banyan.mem_cache.prefix_cache import CacheHold, CacheKey, NoPrefixCache, PrefixCache, PrefixMatch
from banyan.mem_cache.radix_cache import RadixCache
from banyan.mem_cache.radix_tree import Node

KEY = CacheKey()


class Pool:
    """A cache over a pool, with short words for what a scheduler does."""

    def __init__(self, num_slots: int = 256, page: int = 1, policy: str = "lru") -> None:
        self.allocator = SlotAllocator(num_slots, page)
        self.cache = RadixCache(self.allocator, eviction_policy=policy)

    def alloc(self, num_tokens: int) -> np.ndarray:
        slots = self.allocator.alloc_extend(np.array([0]), np.array([num_tokens]), np.array([0]))
        assert slots is not None
        return slots

    def begin(self, tokens: np.ndarray, key: CacheKey = KEY) -> tuple[CacheHold, np.ndarray]:
        """Lock what is known, take slots for the rest; the hold and the row."""
        hold, known = self.cache.lock_prefix(key, tokens)
        row = np.concatenate([known, self.alloc(len(tokens) - len(known))])
        return hold, row

    def put(self, tokens: np.ndarray, key: CacheKey = KEY) -> None:
        """A whole request."""
        hold, row = self.begin(tokens, key)
        self.cache.cache_finished_req(hold, tokens, row)
        self.cache.check()

    def match(self, tokens: np.ndarray, key: CacheKey = KEY) -> int:
        return self.cache.match_prefix(key, tokens).length

    def balances(self, private: int = 0) -> bool:
        self.cache.check()
        return self.allocator.available + self.cache.total_size + private == self.allocator.num_slots


def ids(*spans: int | range) -> np.ndarray:
    return np.concatenate([np.atleast_1d(np.array(span, dtype=np.int32)) for span in spans])


def seq(start: int, length: int) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def test_both_caches_satisfy_the_protocol() -> None:
    allocator = SlotAllocator(16, 4)
    caches: list[PrefixCache] = [RadixCache(allocator), NoPrefixCache(allocator)]
    assert [cache.page_size for cache in caches] == [4, 4]


@pytest.mark.parametrize(("page", "cached"), [(1, 1000), (16, 992), (64, 960)])
def test_a_shared_prefix_is_found_up_to_the_page(page: int, cached: int) -> None:
    pool = Pool(4096, page)
    pool.put(ids(seq(0, 1000), 5, 6, 7))
    second = ids(seq(0, 1000), 8, 9)
    assert pool.cache.match_prefix(KEY, second) == PrefixMatch(cached, cached)
    hold, slots = pool.cache.lock_prefix(KEY, second)
    assert (hold.length, len(slots), slots.dtype) == (cached, cached, np.int32)
    assert (pool.cache.hit_tokens, pool.cache.query_tokens) == (cached, 1003 + 1002)
    assert pool.cache.protected_size == cached


def test_match_is_pure() -> None:
    pool = Pool()
    pool.put(seq(0, 20))
    pool.put(seq(100, 20))
    for _ in range(3):
        assert pool.match(seq(0, 10)) == 10
    assert pool.cache.num_nodes == 2
    assert pool.cache.evict(20) == 20
    assert (pool.match(seq(0, 20)), pool.match(seq(100, 20))) == (0, 20)


def test_pinned_counts_only_what_is_not_locked_already() -> None:
    pool = Pool()
    pool.put(seq(0, 20))
    hold, _ = pool.cache.lock_prefix(KEY, seq(0, 8))
    assert pool.cache.match_prefix(KEY, ids(seq(0, 15), 99)) == PrefixMatch(15, 7)
    assert pool.cache.match_prefix(KEY, seq(0, 5)) == PrefixMatch(5, 0)
    pool.cache.release(hold, seq(0, 8))
    assert pool.cache.match_prefix(KEY, seq(0, 5)) == PrefixMatch(5, 5)


@pytest.mark.parametrize("page", [1, 4])
def test_empty_and_shorter_than_a_page(page: int) -> None:
    pool = Pool(64, page)
    nothing = np.empty(0, np.int32)
    pool.put(seq(0, 8))
    assert pool.cache.match_prefix(KEY, nothing) == PrefixMatch(0, 0)
    hold, slots = pool.cache.lock_prefix(KEY, nothing)
    assert (hold.length, hold.node, len(slots)) == (0, None, 0)
    pool.cache.cache_unfinished_req(hold, nothing, nothing)
    pool.cache.cache_finished_req(hold, nothing, nothing)
    hold, _ = pool.cache.lock_prefix(CacheKey(extra_key="new"), seq(0, 3))
    pool.cache.cache_finished_req(hold, seq(0, 3), pool.alloc(3))
    assert pool.match(seq(0, 3), CacheKey(extra_key="new")) == (3 if page == 1 else 0)
    assert pool.balances()


@pytest.mark.parametrize("page", [1, 4])
def test_the_tree_got_the_same_tokens_in_between(page: int) -> None:
    """Two equal prompts run at once: the second keeps the first one's slots, its own go back exactly once."""
    pool = Pool(64, page)
    tokens = seq(0, 10)
    first, first_row = pool.begin(tokens)
    second, second_row = pool.begin(tokens)
    pool.cache.cache_unfinished_req(first, tokens, first_row)
    own = second_row.copy()
    aligned = 10 // page * page
    pool.cache.cache_unfinished_req(second, tokens, second_row)
    assert second_row[:aligned].tolist() == first_row[:aligned].tolist()
    assert second_row[aligned:].tolist() == own[aligned:].tolist()
    assert pool.allocator.is_free(own[:aligned]).all()
    tail = -(-(10 - aligned) // page) * page
    assert pool.balances(private=2 * tail)
    assert (second.length, pool.cache.protected_size) == (aligned, aligned)
    pool.cache.cache_finished_req(first, tokens, first_row)
    pool.cache.cache_finished_req(second, tokens, second_row)
    assert pool.balances()
    assert pool.cache.protected_size == 0


def test_dedup_of_the_middle_only() -> None:
    """[held | known meanwhile | new | tail] at page 4."""
    pool = Pool(128, 4)
    pool.put(seq(0, 8))
    mine, other = ids(seq(0, 16), seq(50, 9)), ids(seq(0, 16), seq(80, 4))
    hold, row = pool.begin(mine)
    own = row.copy()
    assert hold.length == 8
    pool.put(other)
    pool.cache.cache_unfinished_req(hold, mine, row)
    assert hold.length == 24
    assert (row[:8] == own[:8]).all()
    assert (row[16:] == own[16:]).all()
    assert pool.allocator.is_free(own[8:16]).all()
    _, known = pool.cache.lock_prefix(KEY, mine)
    assert known.tolist() == row[:24].tolist()
    assert pool.balances(private=4)


def test_finish_frees_duplicates_tail_and_unused_slots() -> None:
    pool = Pool(128, 4)
    tokens = seq(0, 13)
    hold, _ = pool.cache.lock_prefix(KEY, tokens)
    row = pool.alloc(30)  # 13 tokens are valid, 17 cells were taken ahead
    pool.put(seq(0, 8))
    pool.cache.cache_finished_req(hold, tokens, row)
    assert pool.cache.total_size == 12
    assert pool.balances()
    with pytest.raises(RuntimeError, match="free"):
        pool.cache.release(hold, row)


def test_a_hold_that_covers_everything() -> None:
    pool = Pool(64, 4)
    pool.put(seq(0, 8))
    for action in ("unfinished", "finished", "release"):
        hold, row = pool.begin(seq(0, 8))
        assert hold.length == 8
        if action == "unfinished":
            pool.cache.cache_unfinished_req(hold, seq(0, 8), row)
            assert (hold.length, pool.cache.protected_size) == (8, 8)
            pool.cache.release(hold, row)
        elif action == "finished":
            pool.cache.cache_finished_req(hold, seq(0, 8), row)
        else:
            pool.cache.release(hold, row)
        assert pool.balances()
        assert (pool.cache.protected_size, pool.cache.num_nodes) == (0, 1)


def test_a_held_path_survives_splits_above_and_inside_it() -> None:
    pool = Pool()
    pool.put(seq(0, 30))
    hold, row = pool.begin(seq(0, 30))
    for cut in (20, 10, 15, 1):
        pool.put(ids(seq(0, cut), 900 + cut))
    assert pool.cache.protected_size == 30
    assert pool.cache.evict(1000) == 4
    longer = ids(seq(0, 30), 7, 8)
    pool.cache.cache_unfinished_req(hold, longer, row := np.concatenate([row, pool.alloc(2)]))
    assert (hold.length, pool.cache.protected_size) == (32, 32)
    pool.cache.release(hold, row)
    assert pool.cache.evict(1000) == 32
    assert pool.balances()


def test_two_holds_on_one_path() -> None:
    pool = Pool()
    pool.put(seq(0, 20))
    short, short_row = pool.begin(seq(0, 10))
    long, long_row = pool.begin(seq(0, 20))
    assert pool.cache.protected_size == 20
    pool.cache.release(long, long_row)
    assert (pool.cache.protected_size, pool.cache.evictable_size) == (10, 10)
    assert pool.cache.evict(100) == 10
    assert pool.match(seq(0, 20)) == 10
    pool.cache.release(short, short_row)
    assert pool.cache.evict(100) == 10
    assert pool.balances()


@pytest.mark.parametrize(
    "other",
    [CacheKey(adapter="a"), CacheKey(weight_version="2"), CacheKey(extra_key="a"), CacheKey(cache_salt="a")],
)
def test_no_field_of_the_key_can_stand_for_another(other: CacheKey) -> None:
    pool = Pool()
    tokens = seq(0, 10)
    pool.put(tokens)
    assert pool.match(tokens, other) == 0
    hold, row = pool.begin(tokens, other)
    pool.put(seq(0, 12))
    pool.cache.cache_finished_req(hold, tokens, row)
    assert (pool.match(seq(0, 12)), pool.match(seq(0, 12), other)) == (12, 10)
    assert pool.cache.total_size == 22
    assert pool.balances()


def test_roots_of_forgotten_keys_go_away() -> None:
    """A client that sends a new salt with each request does not make the process grow."""
    pool = Pool(64)
    for i in range(100):
        pool.put(seq(0, 10), CacheKey(cache_salt=str(i)))
        pool.cache.lock_prefix(CacheKey(cache_salt=f"never {i}"), seq(0, 10))
        pool.cache.evict(10)
    assert len(pool.cache._tree.roots) == 0
    assert pool.balances()


def test_eviction_frees_at_least_what_is_asked_and_only_the_tail_of_a_long_leaf() -> None:
    pool = Pool(2048, 16)
    pool.put(seq(0, 1600))
    assert pool.cache.evict(17) == 208  # an eighth of the leaf, in whole pages
    assert pool.match(seq(0, 1600)) == 1392
    assert pool.cache.evict(0) == pool.cache.evict(-5) == 0
    assert pool.cache.evict(5000) == 1392
    assert (pool.cache.evict(1), pool.cache.evicted_tokens) == (0, 1600)
    assert pool.balances()


def test_reset_is_refused_while_anything_is_locked() -> None:
    pool = Pool()
    pool.put(seq(0, 20))
    hold, row = pool.begin(seq(0, 10))
    with pytest.raises(RuntimeError, match="10 tokens are locked"):
        pool.cache.reset()
    assert pool.match(seq(0, 20)) == 20
    pool.cache.release(hold, row)
    pool.cache.reset()
    assert (pool.cache.total_size, pool.cache.num_nodes, pool.match(seq(0, 20))) == (0, 0, 0)
    assert pool.allocator.available == 256
    pool.cache.reset()


def test_a_request_that_holds_nothing_outlives_a_reset() -> None:
    pool = Pool()
    pool.put(seq(100, 5))
    hold, row = pool.begin(seq(0, 10))
    pool.cache.reset()
    pool.cache.cache_finished_req(hold, seq(0, 10), row)
    assert pool.match(seq(0, 10)) == 10
    assert pool.balances()


def test_forget_with_a_new_start_of_the_allocator() -> None:
    """The repair of broken books: locks and lost slots included, everything is free again."""
    pool = Pool()
    pool.put(seq(0, 20))
    pool.begin(seq(0, 30))
    pool.cache.forget()
    pool.allocator.reset()
    assert (pool.cache.total_size, pool.cache.num_nodes, pool.match(seq(0, 20))) == (0, 0, 0)
    assert pool.allocator.available == 256
    pool.put(seq(0, 256))
    assert pool.balances()


def test_wrong_lengths_are_refused_before_anything_changes() -> None:
    pool = Pool()
    pool.put(seq(0, 10))
    hold, row = pool.begin(seq(0, 10))
    with pytest.raises(ValueError, match="9 tokens in 10 slots"):
        pool.cache.cache_unfinished_req(hold, seq(0, 9), row)
    with pytest.raises(ValueError, match="11 tokens in 10 slots"):
        pool.cache.cache_finished_req(hold, seq(0, 11), row)
    with pytest.raises(ValueError, match="hold covers 10"):
        pool.cache.cache_finished_req(hold, seq(0, 9), row)
    assert pool.balances()
    pool.cache.release(hold, row)
    assert pool.cache.protected_size == 0


def test_token_ids_of_any_integer_type_are_the_same_tokens() -> None:
    pool = Pool()
    pool.put(seq(0, 10).astype(np.int64))
    assert pool.match(seq(0, 10)) == pool.match(seq(0, 20)[::1].astype(np.uint32)) == 10
    assert pool.match(seq(0, 20)[::2]) == 1


@pytest.mark.parametrize("page", [1, 16])
def test_nodes_own_their_arrays(page: int) -> None:
    """A node that kept a view of a row or of a longer node would keep all of it alive."""
    pool = Pool(4096, page)
    big = np.zeros(100_000, np.int32)
    for start in range(20):
        tokens = ids(seq(0, 16 * start), seq(1000 * start, 48))
        hold, row = pool.begin(tokens)
        view = big[: len(tokens)]
        view[:] = row
        pool.cache.cache_unfinished_req(hold, tokens, view)
        pool.cache.release(hold, view)
    pool.cache.evict(200)
    nodes = list(pool.cache._tree.nodes())
    assert len(nodes) > 5
    for node in nodes:
        assert node.slots.base is None
        assert node.slots.flags.owndata
        assert len(node.tokens) == 4 * len(node.slots)


def test_cycles_of_insert_and_evict_leave_nothing_behind() -> None:
    """Nodes that left the tree are gone: nothing refers to them."""

    def num_alive() -> int:
        gc.collect()
        return sum(type(obj) is Node for obj in gc.get_objects())

    before = num_alive()
    pool = Pool(512, 4)
    for cycle in range(1000):
        tokens = ids(seq(0, 64), seq(1000 * cycle, 64))
        missing = 128 - pool.allocator.available
        if missing > 0:
            pool.cache.evict(missing)
        hold, row = pool.begin(tokens)
        pool.cache.cache_finished_req(hold, tokens, row)
    assert num_alive() - before == pool.cache.num_nodes + 1  # and the sentinel of the order's list
    assert pool.balances()


def test_check_finds_what_is_broken() -> None:
    def broken(change: str) -> None:
        pool = Pool(64, 4)
        pool.put(seq(0, 16))
        pool.put(ids(seq(0, 8), seq(90, 8)))
        nodes = list(pool.cache._tree.nodes())
        leaf = next(node for node in nodes if not node.children)
        exec(change, {"pool": pool, "leaf": leaf, "tree": pool.cache._tree, "nodes": nodes})
        pool.cache.check()

    for change, message in [
        ("tree.evictable_size += 4", "the tree says"),
        ("tree.num_nodes -= 1", "the tree says"),
        ("leaf.lock_ref = 1", "locks has"),
        ("leaf.parent.children.clear()", "the tree says"),
        ("leaf.slots = leaf.slots[:3].copy()", "an edge of"),
        ("leaf.slots = leaf.slots[:]", "view"),
        ("leaf.slots[0] += 1", "one page of slots"),
        ("leaf.slots[:] = leaf.parent.slots", "twice"),
        ("leaf.slots += 1000", "outside"),
        ("pool.allocator.free(leaf.slots)", "free slot"),
        ("tree._order.discard(leaf)", "lru"),
        ("tree._order.discard(leaf.parent); leaf.prev, leaf.next", "lru"),
        ("leaf.parent = nodes[-1] if leaf is not nodes[-1] else nodes[1]", "parent"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            broken(change)


def test_no_prefix_cache_frees_everything() -> None:
    allocator = SlotAllocator(32, 4)
    cache = NoPrefixCache(allocator)
    for finish in (True, False):
        slots = allocator.alloc_extend(np.array([0]), np.array([10]), np.array([0]))
        assert slots is not None
        hold, known = cache.lock_prefix(KEY, seq(0, 10))
        assert (hold.length, len(known), cache.match_prefix(KEY, seq(0, 10))) == (0, 0, PrefixMatch(0, 0))
        cache.cache_unfinished_req(hold, seq(0, 10), slots)
        assert hold.length == 0
        if finish:
            cache.cache_finished_req(hold, seq(0, 9), slots)
        else:
            cache.release(hold, slots)
        assert allocator.available == 32
    cache.reset()
    assert (cache.evict(10), cache.evictable_size, cache.protected_size) == (0, 0, 0)
