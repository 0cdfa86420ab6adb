"""Tree, allocator and row pool together against a naive model: a dict of token tuples, one entry per cached page."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from banyan.mem_cache.allocator import SlotAllocator
from banyan.mem_cache.prefix_cache import CacheHold, CacheKey
from banyan.mem_cache.radix_cache import RadixCache
from banyan.mem_cache.req_to_token import ReqToTokenPool

KEYS = [CacheKey(), CacheKey(extra_key="x"), CacheKey(cache_salt="x")]
NUM_ROWS = 6


@dataclass
class Page:
    slots: tuple[int, ...]
    created: int
    locks: int = 0
    hits: int = 0
    priority: int = 0
    used: int = 0


@dataclass
class Live:
    key: CacheKey
    tokens: list[int]
    row: int
    hold: CacheHold
    computed: int = 0
    path: list[tuple[CacheKey, tuple[int, ...]]] = field(default_factory=list)


RANKS = {
    "lru": lambda page: (page.used,),
    "mru": lambda page: (-page.used,),
    "fifo": lambda page: (page.created, page.used),
    "lfu": lambda page: (page.hits, page.used),
    "slru": lambda page: (page.hits >= 2, page.used),
    "priority": lambda page: (page.priority, page.used),
}


class CacheMachine(RuleBasedStateMachine):
    @initialize(page=st.sampled_from([1, 4, 16]), policy=st.sampled_from(sorted(RANKS)), num_pages=st.integers(6, 40))
    def build(self, page: int, policy: str, num_pages: int) -> None:
        self.page, self.policy = page, policy
        self.allocator = SlotAllocator(num_pages * page, page)
        self.cache = RadixCache(self.allocator, eviction_policy=policy)
        self.rows = ReqToTokenPool(NUM_ROWS, 64 * page)
        self.model: dict[tuple[CacheKey, tuple[int, ...]], Page] = {}
        self.kv: dict[int, tuple[CacheKey, tuple[int, ...]]] = {}  # slot -> whose K and V it holds
        self.live: list[Live] = []
        self.clock = 0

    # the model

    def paths(self, key: CacheKey, tokens: list[int]) -> list[tuple[CacheKey, tuple[int, ...]]]:
        return [(key, tuple(tokens[:end])) for end in range(self.page, len(tokens) + 1, self.page)]

    def model_match(self, key: CacheKey, tokens: list[int]) -> list[tuple[CacheKey, tuple[int, ...]]]:
        found = []
        for path in self.paths(key, tokens):
            if path not in self.model:
                break
            found.append(path)
        return found

    def model_unlock(self, paths: list[tuple[CacheKey, tuple[int, ...]]], priority: int) -> None:
        self.clock += 1
        for path in paths:
            self.model[path].locks -= 1
            self.model[path].priority = max(self.model[path].priority, priority)
            if self.model[path].locks == 0:
                self.model[path].used = self.clock

    def model_insert(self, req: Live, num_tokens: int) -> None:
        """What the cache is given: pages that are new come from the row, the request's lock moves down."""
        self.clock += 1
        row = self.rows.table[req.row].tolist()
        for i, path in enumerate(self.paths(req.key, req.tokens[:num_tokens])):
            if i < len(req.path):
                continue
            page = self.model.setdefault(path, Page(tuple(row[i * self.page : (i + 1) * self.page]), self.clock))
            page.locks += 1
            page.hits += 1
            req.path.append(path)

    def model_evict(self, num_tokens: int) -> None:
        for _ in range(num_tokens // self.page):
            inner = {(key, tokens[: -self.page]) for key, tokens in self.model}
            leaves = [path for path, page in self.model.items() if page.locks == 0 and path not in inner]
            del self.model[min(leaves, key=lambda path: RANKS[self.policy](self.model[path]))]

    # the requests

    def write_kv(self, req: Live, start: int, slots: np.ndarray) -> None:
        self.rows.write(req.row, start, slots)
        for i, slot in enumerate(slots.tolist()):
            self.kv[slot] = (req.key, tuple(req.tokens[: start + i + 1]))

    def make_room(self, cost: int) -> None:
        if self.allocator.available < cost:
            self.evict(cost - self.allocator.available)

    def extend(self, req: Live, end: int) -> bool:
        prefix, seq = np.array([req.computed]), np.array([end])
        cost = self.allocator.extend_cost(prefix, seq)
        self.make_room(cost)
        before = self.allocator.available
        slots = self.allocator.alloc_extend(prefix, seq, self.rows.table[req.row, [max(req.computed - 1, 0)]])
        assert (slots is None) == (cost > before)
        if slots is None:
            return False
        assert before - self.allocator.available == cost
        self.write_kv(req, req.computed, slots)
        req.computed = end
        return True

    def row_slots(self, req: Live, end: int) -> np.ndarray:
        return self.rows.table[req.row, :end]

    def drop(self, req: Live) -> None:
        self.live.remove(req)
        self.rows.free(req.row)
        self.model_unlock(req.path, req.hold.priority)

    def pick(self, who: int) -> Live:
        return self.live[who % len(self.live)]

    @staticmethod
    def between(low: int, high: int, percent: int) -> int:
        return low + (high - low) * percent // 100

    @precondition(lambda self: len(self.live) < NUM_ROWS)
    @rule(
        key=st.integers(0, 9),
        word=st.integers(0, 15),
        num_pages=st.integers(0, 4),
        tail=st.integers(0, 15),
        share=st.integers(0, 150),
    )
    def start(self, key: int, word: int, num_pages: int, tail: int, share: int) -> None:
        """A prompt of a few pages; mostly it begins with part (share percent) of what another request has."""
        tokens: list[int] = []
        if share and self.live:
            other = self.pick(word)
            tokens = other.tokens[: self.between(0, len(other.tokens), min(share, 100))]
        tokens += [word >> i & 1 for i in range(num_pages) for _ in range(self.page)] + [7] * (tail % self.page)
        self.admit(KEYS[max(key - 7, 0)], tokens[: 40 * self.page], priority=tail % 3)

    def admit(self, key: CacheKey, tokens: list[int], priority: int) -> None:
        matched = self.model_match(key, tokens)
        pinned = sum(self.page for path in matched if self.model[path].locks == 0)
        sizes = self.cache.evictable_size, self.cache.num_nodes
        match = self.cache.match_prefix(key, np.array(tokens, np.int32))
        assert match == (len(matched) * self.page, pinned)
        assert sizes == (self.cache.evictable_size, self.cache.num_nodes)
        hold, slots = self.cache.lock_prefix(key, np.array(tokens, np.int32))
        assert hold.length == len(slots) == match.length
        assert self.cache.evictable_size == sizes[0] - pinned
        hold.priority = priority
        for path in matched:
            self.model[path].locks += 1
            self.model[path].hits += 1
        row = self.rows.alloc()
        assert row is not None
        self.rows.write(row, 0, slots)
        self.live.append(Live(key, tokens, row, hold, hold.length, matched))

    @precondition(lambda self: self.live)
    @rule(who=st.integers(0, NUM_ROWS), percent=st.integers(0, 200), given=st.integers(0, 200))
    def prefill(self, who: int, percent: int, given: int) -> None:
        """A chunk of the prompt, given to the cache afterwards (all of it or less)."""
        req = self.pick(who)
        end = self.between(req.computed, len(req.tokens), min(percent, 100))
        if end > req.computed and not self.extend(req, end):
            return
        num = self.between(req.hold.length, req.computed, min(given, 100))
        self.model_insert(req, num)
        self.cache.cache_unfinished_req(req.hold, np.array(req.tokens[:num], np.int32), self.row_slots(req, num))
        assert req.hold.length == num // self.page * self.page

    @precondition(lambda self: any(req.computed == len(req.tokens) > 0 for req in self.live))
    @rule(word=st.integers(0, 15), count=st.integers(1, 6))
    def decode(self, word: int, count: int) -> None:
        for step in range(count):
            reqs = [req for req in self.live if req.computed == len(req.tokens) > 0 and len(req.tokens) < 60 * self.page]
            seq_lens = np.array([req.computed + 1 for req in reqs], np.int32)
            cost = self.allocator.decode_cost(seq_lens)
            self.make_room(cost)
            before = self.allocator.available
            last = np.array([self.rows.table[req.row, req.computed - 1] for req in reqs], np.int32)
            slots = self.allocator.alloc_decode(seq_lens, last)
            assert (slots is None) == (cost > before)
            if slots is None:
                return
            assert before - self.allocator.available == cost
            for req, slot in zip(reqs, slots, strict=True):
                req.tokens.append(word >> (step % 4) & 1)
                self.write_kv(req, req.computed, np.array([slot]))
                req.computed += 1

    @precondition(lambda self: self.live)
    @rule(who=st.integers(0, NUM_ROWS), given=st.integers(0, 200))
    def finish(self, who: int, given: int) -> None:
        req = self.pick(who)
        num = self.between(req.hold.length, req.computed, min(given, 100))
        self.model_insert(req, num)
        self.cache.cache_finished_req(req.hold, np.array(req.tokens[:num], np.int32), self.row_slots(req, req.computed))
        assert (req.hold.length, req.hold.node) == (0, None)
        self.drop(req)

    @precondition(lambda self: self.live)
    @rule(who=st.integers(0, NUM_ROWS))
    def abort(self, who: int) -> None:
        req = self.pick(who)
        self.cache.release(req.hold, self.row_slots(req, req.computed))
        self.drop(req)

    @rule(num_tokens=st.integers(0, 100))
    def evict(self, num_tokens: int) -> None:
        evictable, available = self.cache.evictable_size, self.allocator.available
        freed = self.cache.evict(num_tokens)
        assert freed >= min(num_tokens, evictable)
        assert self.allocator.available - available == freed == evictable - self.cache.evictable_size
        self.model_evict(freed)

    @precondition(lambda self: len(self.model) > 6)
    @rule()
    def reset(self) -> None:
        if any(page.locks for page in self.model.values()):
            with pytest.raises(RuntimeError, match="locked"):
                self.cache.reset()
        else:
            self.cache.reset()
            self.model.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        sizes = [sum(self.page for page in self.model.values() if (page.locks > 0) == locked) for locked in (True, False)]
        assert [self.cache.protected_size, self.cache.evictable_size] == sizes
        private = sum(-(-req.computed // self.page) * self.page - req.hold.length for req in self.live)
        assert self.allocator.available + private + self.cache.total_size == self.allocator.num_slots
        owned = [slot for page in self.model.values() for slot in page.slots]
        for (key, tokens), page in self.model.items():
            expected = [(key, tokens[: len(tokens) - self.page + i + 1]) for i in range(self.page)]
            assert [self.kv[slot] for slot in page.slots] == expected
            assert self.cache.match_prefix(key, np.array(tokens, np.int32)).length == len(tokens)
        for req in self.live:
            row = self.row_slots(req, req.computed).tolist()
            assert [self.kv[slot] for slot in row] == [(req.key, tuple(req.tokens[: i + 1])) for i in range(req.computed)]
            assert row[: req.hold.length] == [slot for path in req.path for slot in self.model[path].slots]
            owned += row[req.hold.length :]
        assert len(set(owned)) == len(owned)
        assert self.allocator.is_free(np.array(owned, np.int32)).sum() == 0
        assert self.rows.available == NUM_ROWS - len(self.live)


def test_cache_agrees_with_a_naive_model() -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("policy", sorted(RANKS))
def test_long_random_runs_agree_with_the_naive_model(page: int, policy: str) -> None:
    """The same rules in the mix of a busy server: many prompts that overlap, few resets."""
    rng = random.Random(f"{page} {policy}")
    machine = CacheMachine()
    machine.build(page=page, policy=policy, num_pages=40)
    for _ in range(150):
        action = rng.choices(["start", "prefill", "decode", "finish", "abort", "evict"], [8, 12, 6, 5, 1, 1])[0]
        if action == "start" and len(machine.live) < NUM_ROWS:
            numbers = (rng.randrange(10), rng.randrange(16), rng.randrange(5), rng.randrange(16), rng.randrange(150))
            machine.start(**dict(zip(("key", "word", "num_pages", "tail", "share"), numbers, strict=True)))
        elif action == "decode":
            machine.decode(word=rng.randrange(16), count=rng.randrange(1, 7))
        elif action == "evict":
            machine.evict(num_tokens=rng.randrange(8 * page))
        elif action == "prefill" and machine.live:
            machine.prefill(who=rng.randrange(6), percent=rng.randrange(200), given=rng.randrange(200))
        elif action == "finish" and machine.live:
            machine.finish(who=rng.randrange(6), given=rng.randrange(200))
        elif machine.live:
            machine.abort(who=rng.randrange(6))
        machine.agrees()
    for req in list(machine.live):
        machine.abort(who=machine.live.index(req))
    machine.reset()
    assert machine.allocator.available == machine.allocator.num_slots
