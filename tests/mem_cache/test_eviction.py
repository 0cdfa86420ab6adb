"""Which leaf goes first, for each policy; the exact order in large is in test_cache_machine."""

from __future__ import annotations

import numpy as np
import pytest

from banyan.mem_cache.allocator import SlotAllocator
from banyan.mem_cache.eviction import EVICTION_POLICIES, make_order
from banyan.mem_cache.prefix_cache import CacheKey
from banyan.mem_cache.radix_cache import RadixCache

KEY = CacheKey()


class Story:
    """Prompts by name, each of 8 tokens that no other has; ``under`` puts one behind another."""

    def __init__(self, policy: str) -> None:
        self.allocator = SlotAllocator(256, 1)
        self.cache = RadixCache(self.allocator, eviction_policy=policy)
        self.tokens: dict[str, np.ndarray] = {}

    def use(self, name: str, *, under: str = "", priority: int = 0) -> None:
        if name not in self.tokens:
            head = self.tokens[under] if under else np.empty(0, np.int32)
            self.tokens[name] = np.concatenate([head, np.arange(8, dtype=np.int32) + 8 * len(self.tokens)])
        tokens = self.tokens[name]
        hold, known = self.cache.lock_prefix(KEY, tokens)
        hold.priority = priority
        new = self.allocator.alloc_extend(np.array([0]), np.array([len(tokens) - len(known)]), np.array([0]))
        assert new is not None
        self.cache.cache_finished_req(hold, tokens, np.concatenate([known, new]))
        self.cache.check()

    def order(self) -> str:
        """Names in the order in which they go."""
        gone = ""
        alive = set(self.tokens)
        while self.cache.total_size:
            self.cache.evict(8)
            self.cache.check()
            lost = {name for name in alive if self.cache.match_prefix(KEY, self.tokens[name]).length < len(self.tokens[name])}
            gone += "".join(sorted(lost))
            alive -= lost
        return gone


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "bdac"),  # last uses: b, d, a, c
        ("mru", "cadb"),
        ("fifo", "abcd"),
        ("lfu", "bdac"),  # b and d once, a twice, c three times
        ("slru", "bdac"),
        ("priority", "dbac"),  # d 0; b 1; a 2 (its highest), c 3
    ],
)
def test_order_of_independent_prompts(policy: str, order: str) -> None:
    story = Story(policy)
    story.use("a")
    story.use("b", priority=1)
    story.use("c", priority=3)
    story.use("c")
    story.use("d")
    story.use("a", priority=2)
    story.use("c")
    assert story.order() == order


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_parent_never_goes_before_its_children(policy: str) -> None:
    story = Story(policy)
    story.use("a")
    story.use("b", under="a")
    story.use("c", under="b")
    story.use("d", under="a")
    order = story.order()
    assert sorted(order) == list("abcd")
    assert order.index("c") < order.index("b") < order.index("a")
    assert order.index("d") < order.index("a")


def test_lru_keeps_an_old_parent_that_was_touched_below() -> None:
    story = Story("lru")
    story.use("a")
    story.use("b", under="a")
    story.use("x")
    story.use("b")
    assert story.order() == "xba"


def test_lru_inner_node_that_becomes_a_leaf_is_in_its_old_place() -> None:
    story = Story("lru")
    story.use("a")
    story.use("b", under="a")
    story.use("x")
    story.use("y")
    assert story.order() == "baxy"


def test_fifo_the_upper_part_of_a_split_is_as_old_as_the_whole() -> None:
    story = Story("fifo")
    story.use("old")
    story.use("a")
    story.use("new")
    hold, row = story.cache.lock_prefix(KEY, story.tokens["old"])
    head, head_row = story.cache.lock_prefix(KEY, story.tokens["a"][:4])
    story.cache.release(head, head_row)
    assert story.cache.evict(4) == 4
    story.cache.release(hold, row)
    assert story.cache.match_prefix(KEY, story.tokens["a"]).length == 4
    story.cache.evict(8)
    assert [story.cache.match_prefix(KEY, story.tokens[name]).length for name in ("old", "a", "new")] == [0, 4, 8]
    story.cache.evict(4)
    assert [story.cache.match_prefix(KEY, story.tokens[name]).length for name in ("old", "a", "new")] == [0, 0, 8]


def test_slru_protects_what_was_used_twice() -> None:
    story = Story("slru")
    for name in "aabbcde":
        story.use(name)
    assert story.order() == "cdeab"


def test_lfu_counts_requests_not_chunks() -> None:
    """Giving a prompt to the cache chunk by chunk is one use of each of its tokens."""
    story = Story("lfu")
    story.use("a")
    tokens = np.arange(100, 108, dtype=np.int32)
    hold, _ = story.cache.lock_prefix(KEY, tokens)
    row = story.allocator.alloc_extend(np.array([0]), np.array([8]), np.array([0]))
    assert row is not None
    for end in range(2, 9, 2):
        story.cache.cache_unfinished_req(hold, tokens[:end], row[:end])
    story.cache.cache_finished_req(hold, tokens, row)
    assert {node.hits for node in story.cache._tree.nodes()} == {1}


@pytest.mark.parametrize("policy", ["lfu", "slru", "fifo", "priority"])
def test_the_heap_does_not_grow_with_locks_and_unlocks(policy: str) -> None:
    story = Story(policy)
    for _ in range(300):
        for name in "abc":
            story.use(name)
    assert len(story.cache._tree._order._heap) <= 2 * 3 + 65  # type: ignore[attr-defined]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'fancy'.*lru"):
        make_order("fancy")
