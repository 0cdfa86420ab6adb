"""The reports tell the truth, change nothing, look at a bounded number of nodes, and keep the namespaces apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.mem_cache import cache_report
from banyan.mem_cache.allocator import SlotAllocator
from banyan.mem_cache.cache_report import HEAD_TOKENS, MAX_NODES, TAIL_TOKENS, explain, hottest
from banyan.mem_cache.prefix_cache import CacheKey
from banyan.mem_cache.radix_cache import RadixCache
from banyan.mem_cache.radix_tree import Node

PLAIN = CacheKey()


def cache_of(page_size: int = 1, num_slots: int = 1 << 16) -> RadixCache:
    return RadixCache(SlotAllocator(num_slots, page_size))


def remember(cache: RadixCache, ids: list[int], key: CacheKey = PLAIN) -> None:
    """One request with these tokens comes and goes."""
    tokens = np.array(ids, np.int32)
    hold, prefix = cache.lock_prefix(key, tokens)
    start, end = np.array([len(prefix)]), np.array([len(ids)])
    slots = cache._allocator.alloc_extend(start, end, prefix[-1:] if len(prefix) else np.array([0]))
    assert slots is not None
    cache.cache_finished_req(hold, tokens, np.concatenate([prefix, slots]))


def ask(cache: RadixCache, ids: list[int], key: CacheKey = PLAIN) -> cache_report.Explanation:
    return explain(cache.tree, key, np.array(ids, np.int32))


def seq(start: int, size: int) -> list[int]:
    return list(range(start, start + size))


def test_the_hottest_come_first_and_are_not_listed_twice() -> None:
    cache = cache_of()
    system = seq(1000, 300)
    for user in range(5):
        remember(cache, system + seq(2000 + 10 * user, 10))
    remember(cache, seq(5000, 40))
    remember(cache, seq(5000, 40))
    prefixes, complete = hottest(cache.tree, 3)
    assert complete
    assert [(item.num_tokens, item.hits) for item in prefixes] == [(300, 5), (40, 2), (310, 1)]
    assert prefixes[0].head == system[:HEAD_TOKENS]
    assert prefixes[0].tail == system[-TAIL_TOKENS:]
    assert prefixes[1].tail == seq(5000, 40)
    assert prefixes[2].tail is not None and len(prefixes[2].tail) == TAIL_TOKENS
    assert [item.last_use for item in prefixes] == [1, 0, 2]
    cache.lock_prefix(PLAIN, np.array([*system, 2000], np.int32))
    assert next((item.in_use, item.last_use) for item in hottest(cache.tree, 3)[0]) == (True, 0)


@pytest.mark.parametrize("key", [CacheKey(extra_key="x"), CacheKey(cache_salt="x")])
def test_the_tokens_of_named_namespaces_are_not_shown(key: CacheKey) -> None:
    cache = cache_of()
    remember(cache, seq(10, 30), key)
    (prefix,), _ = hottest(cache.tree, 5)
    assert (prefix.num_tokens, prefix.hits, prefix.head, prefix.tail) == (30, 1, None, None)


def test_an_empty_tree() -> None:
    cache = cache_of()
    assert hottest(cache.tree, 5) == ([], True)
    found = ask(cache, [1, 2, 3])
    assert (found.would_hit, found.nearest) == (0, None)
    assert found.reason == "Nothing is cached in this namespace."


def test_an_inserted_token_is_found_and_what_it_costs() -> None:
    cache = cache_of()
    system = seq(1000, 200)
    remember(cache, system)
    found = ask(cache, [*system[:50], 7, *system[50:], 9])
    assert (found.num_tokens, found.would_hit, found.complete) == (202, 50, True)
    assert found.nearest is not None
    assert found.nearest.at == 50
    assert found.nearest.before == system[26:50]
    assert found.nearest.prompt == [7, *system[50:73]]
    assert found.nearest.cached == system[50:74]
    assert (found.nearest.prompt_extra, found.nearest.cached_extra, found.nearest.agree_again) == (1, 0, 150)
    assert "at token 50" in found.reason


def test_of_several_branches_the_one_that_agrees_again_is_the_nearest() -> None:
    """Ten requests with a timestamp each, and one other that is hotter."""
    cache = cache_of()
    before, after = seq(1000, 40), seq(3000, 60)
    for _ in range(3):
        remember(cache, before + seq(6000, 80))
    for stamp in range(10):
        remember(cache, [*before, 100 + stamp, *after])
    found = ask(cache, [*before, 200, *after, 5])
    assert found.would_hit == 40
    assert found.nearest is not None
    assert (found.nearest.at, found.nearest.prompt_extra, found.nearest.cached_extra) == (40, 1, 1)
    assert found.nearest.agree_again == 60
    assert found.nearest.cached[1:] == after[:23]


def test_a_prompt_that_is_cached_whole() -> None:
    cache = cache_of()
    remember(cache, seq(10, 30))
    assert ask(cache, seq(10, 30)).reason.startswith("All but the last token is cached")
    assert ask(cache, seq(10, 20)).would_hit == 19
    longer = ask(cache, seq(10, 35))
    assert longer.would_hit == 30
    assert longer.reason == "Nothing is cached behind these 30 tokens."


def test_pages_are_explained() -> None:
    cache = cache_of(page_size=16)
    remember(cache, seq(100, 64))
    found = ask(cache, seq(100, 40) + [7] * 40)
    assert (found.would_hit, found.nearest and found.nearest.at) == (32, 40)
    assert found.reason == (
        "The prompt departs from the nearest cached prefix at token 40; whole pages of 16 tokens are shared, so 32 of them are."
    )
    assert ask(cache, seq(100, 30)).reason == (
        "The prompt ends after 30 tokens that agree; whole pages of 16 tokens are shared, so 16 of them are."
    )
    remember(cache, seq(100, 32) + [9] * 32)
    found = ask(cache, seq(100, 40) + [7] * 40)
    assert (found.would_hit, found.nearest and found.nearest.at) == (32, 40), "the better of two branches in a page"


def test_other_namespaces_are_counted_only_and_salted_ones_never() -> None:
    cache = cache_of()
    prompt = seq(10, 50)
    remember(cache, prompt[:5])
    for key in (CacheKey(extra_key="b"), CacheKey(weight_version="old"), CacheKey(cache_salt="s"), CacheKey("", "", "b", "s")):
        remember(cache, prompt, key)
    remember(cache, seq(500, 9), CacheKey(extra_key="c"))
    found = ask(cache, prompt)
    assert (found.would_hit, found.namespaces_seen, found.namespaces_better) == (5, 3, 2)
    assert found.nearest is None
    assert ask(cache, prompt, CacheKey(cache_salt="s")).would_hit == 49
    assert ask(cache, prompt, CacheKey(cache_salt="none")).reason == "Nothing is cached in this namespace."


class Counted(Node):
    """A node that counts how often its children are looked at."""

    looked = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("hits", "slots"):
            Counted.looked += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("shape", ["wide", "deep", "namespaces"])
def test_the_cost_is_bounded(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(num_slots=1 << 20)
    size = 3 * MAX_NODES
    monkeypatch.setattr("banyan.mem_cache.radix_tree.Node", Counted)
    slots = iter(range(1, 1 << 20))
    leaf: Node | None = None
    for index in range(size):
        key = CacheKey(extra_key=str(index)) if shape == "namespaces" else PLAIN
        ids = [index + 1] if shape != "deep" else [1]
        parent = leaf if shape == "deep" and leaf is not None else cache.tree.root_of(key)
        leaf = cache.tree.attach(parent, np.array(ids, np.int32).tobytes(), np.array([next(slots)], np.int32))
    Counted.looked = 0
    assert not hottest(cache.tree, 10)[1], "it says that it did not look at everything"
    assert 0 < Counted.looked < 8 * MAX_NODES
    Counted.looked = 0
    assert ask(cache, [1] * size).complete == (shape == "wide"), "of a wide node's branches a sample will do"
    assert 0 < Counted.looked < 8 * MAX_NODES


@settings(max_examples=40, deadline=None)
@given(
    page_size=st.sampled_from([1, 4]),
    cached=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), max_size=8),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
)
def test_the_explanation_is_what_a_lookup_finds(page_size: int, cached: list[list[int]], prompt: list[int]) -> None:
    cache = cache_of(page_size)
    for ids in cached:
        remember(cache, ids)
    before = [(node.tokens, node.hits, node.used, node.lock_ref) for node in cache.tree.nodes()]
    found = ask(cache, prompt)
    hot, complete = hottest(cache.tree, 100)
    assert found.complete and complete
    assert found.would_hit == cache.match_prefix(PLAIN, np.array(prompt[:-1], np.int32)).length
    shared = [ids[: len(ids) // page_size * page_size] for ids in cached]
    if found.nearest is not None:
        at = found.nearest.at
        longest = max((i for ids in shared for i in range(len(ids) + 1) if ids[:i] == prompt[:i]), default=0)
        assert at == longest
        assert any(ids[:at] == prompt[:at] and ids[at : at + len(found.nearest.cached)] == found.nearest.cached for ids in shared)
        assert found.nearest.prompt == prompt[at:]
    assert [item.hits for item in hot] == sorted((item.hits for item in hot), reverse=True)
    assert all(item.tail in [ids[: item.num_tokens] for ids in shared] for item in hot)
    assert before == [(node.tokens, node.hits, node.used, node.lock_ref) for node in cache.tree.nodes()]
