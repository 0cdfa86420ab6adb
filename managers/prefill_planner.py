"""PrefillPlanner: pulls requests out of the queue in order, looks their prefixes up, plans a prefill step. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..mem_cache.allocator import SlotAllocator
from ..mem_cache.prefix_cache import CacheKey, NoPrefixCache, PrefixCache
from .live_table import LiveTable
from .pins import Pins
from .prefill_adder import CLIP_MAX_NEW_TOKENS, Admission, Candidate, PrefillBudget, plan_prefill
from .req import Req
from .retraction import NewTokenRatio
from .sessions.holds import SessionHolds
from .waiting_queue import WaitingQueue

# Tokens that a request must be about to find in the cache for it to be worth a step of waiting, by device: on a CPU a step costs as
# much time as so many tokens; on a GPU many times that, so there it is a compromise with latency.
SHARED_MIN = {"cpu": 4, "cuda": 32}
WORTH_ANY_WAIT = 32  # tokens for which a request waits however often it has waited
MAX_WAITS = 4  # prefill steps that pass a request over for less
MAX_DEFERRED = 128  # requests that are passed over in one plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The owners of slots and rows: free + cached + private to rows = total. holds, pins: what outlives its request locked."""

    allocator: SlotAllocator
    cache: PrefixCache
    table: LiveTable
    holds: SessionHolds
    pins: Pins

    def drop_hold(self) -> bool:
        """Release one lock that outlived its request, pins before sessions; False if there is none."""
        return self.pins.drop_oldest() or self.holds.drop_oldest()


@dataclass(slots=True, kw_only=True)
class PrefillLimits:
    """What one prefill step may hold. shared_chunk: tokens of a prompt beside requests that decode, None: no other limit.

    chunked_prefill_size: a multiple of the page size; None: prompts are never split. mixed: decode in the same step.
    decode_interval: decode steps between two prefill steps while anything decodes. shared_min: see SHARED_MIN.
    """

    max_prefill_tokens: int = 16384
    chunked_prefill_size: int | None = None
    max_requests: int | None = None
    mixed: bool = False
    decode_interval: int = 0
    shared_chunk: int | None = None
    shared_min: int = SHARED_MIN["cuda"]


@dataclass(slots=True)
class PrefillPlan:
    """admissions[i] says how much of reqs[i] to compute. head: the first request that did not fit, None if all did.

    deferred: what was passed over because it will find more in the cache a step later.
    """

    reqs: list[Req]
    admissions: list[Admission]
    head: Req | None
    deferred: list[Req]


class PrefillPlanner:
    """``prefilling`` names, by row, the prompts whose KV is being computed and not shared yet.

    A waiting request that shares more than what is cached with one of these is passed over: a step later it hits the cache.
    """

    def __init__(self, memory: Memory, waiting: WaitingQueue, limits: PrefillLimits, ratio: NewTokenRatio) -> None:
        self.limits = limits
        self.prefilling: dict[int, tuple[CacheKey, np.ndarray]] = {}
        self._memory = memory
        self._waiting = waiting
        self._ratio = ratio
        self._shares = not isinstance(memory.cache, NoPrefixCache)

    def plan(self, chunked: Req | None, running: np.ndarray) -> PrefillPlan:
        """Whom to admit beside the rows that run; ``chunked`` goes first."""
        pulled: list[Req] = []
        deferred: list[Req] = []
        admissions = plan_prefill(self._candidates(chunked, running, pulled, deferred), self._budget(running))
        reqs = [pulled[admission.queue_index] for admission in admissions]
        return PrefillPlan(reqs, admissions, pulled[-1] if len(pulled) > len(reqs) else None, deferred)

    def shortfall(self, req: Req, running: np.ndarray) -> int:
        """Tokens that are missing for a request to be admitted; at least 1 if what it lacks is a row."""
        match = self._memory.cache.match_prefix(req.key, req.matchable)
        budget = self._budget(running)
        missing = budget.need(Candidate(req.num_tokens, match.length, match.pinned, req.max_new_tokens)) - budget.room
        return max(int(np.ceil(missing)), 0 if budget.rows > 0 else 1)

    def _candidates(self, chunked: Req | None, running: np.ndarray, pulled: list[Req], deferred: list[Req]) -> Iterator[Candidate]:
        table = self._memory.table
        if chunked is not None:
            row = chunked.row
            pulled.append(chunked)
            yield Candidate(
                num_tokens=int(table.known_lens[row]),
                prefix_len=int(table.kv_lens[row]),
                pinned=0,
                max_new_tokens=int(table.limits[row] - table.known_lens[row]),
                continuing=True,
            )
        for req in self._waiting.ordered(self._running_keys(running)):
            match = self._memory.cache.match_prefix(req.key, req.matchable)
            if self._shares and self._is_worth_waiting(req, match.length, pulled):
                if len(deferred) == MAX_DEFERRED:
                    return
                deferred.append(req)
                continue
            pulled.append(req)
            yield Candidate(req.num_tokens, match.length, match.pinned, req.max_new_tokens)

    def _is_worth_waiting(self, req: Req, num_cached: int, pulled: list[Req]) -> bool:
        prompts = [*self.prefilling.values(), *((other.key, other.token_ids) for other in pulled if not other.row)]
        shared_min = self.limits.shared_min if req.num_waits < MAX_WAITS else max(self.limits.shared_min, WORTH_ANY_WAIT)
        page_size = self._memory.allocator.page_size
        needed = -(-(num_cached + shared_min) // page_size) * page_size
        mine = req.matchable[:needed]
        return len(mine) == needed and any(
            key == req.key and len(ids) >= needed and ids[needed - 1] == mine[-1] and np.array_equal(ids[:needed], mine)
            for key, ids in prompts
        )

    def _running_keys(self, running: np.ndarray) -> dict[str, int]:
        if self._waiting.policy.name != "routing-key":
            return {}
        return Counter(self._memory.table.req(row).routing_key for row in running.tolist())

    def _chunk(self, num_running: int) -> int | None:
        """Most prompt tokens of the next step. A chunk that is paced leaves out of account what decodes beside it."""
        limits, page_size = self.limits, self._memory.allocator.page_size
        whole = limits.chunked_prefill_size
        if whole is not None and limits.mixed:
            whole = max(whole - num_running, page_size)
        if limits.shared_chunk is None or not num_running:
            return whole
        return limits.shared_chunk if whole is None else min(whole, limits.shared_chunk)

    def _budget(self, running: np.ndarray) -> PrefillBudget:
        memory, table, limits = self._memory, self._memory.table, self.limits
        rest = np.minimum(table.limits[running] - table.launched_lens[running], CLIP_MAX_NEW_TOKENS)
        mixed = len(running) if limits.mixed else 0
        return PrefillBudget(
            free_tokens=memory.allocator.available + memory.cache.evictable_size,
            reserved_tokens=float(rest.sum()) * self._ratio.value + mixed * memory.allocator.page_size,
            input_tokens=limits.max_prefill_tokens - mixed,
            chunk_tokens=self._chunk(len(running)),
            rows=min(table.pool.available, limits.max_requests or table.pool.available),
            page_size=memory.allocator.page_size,
        )
