"""WaitingQueue: the requests that have no row, in the order in which the policy wants them served.

Match lengths come from a PrefixWatch, so a pass over a long queue looks only at what changed. Columns are dense arrays; a request
that leaves is replaced by the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..mem_cache.prefix_cache import PrefixCache
from ..mem_cache.prefix_watch import PrefixWatch
from ..mem_cache.radix_cache import RadixCache
from .req import Req
from .schedule_policy import CACHE_AWARE, QueueView, SchedulePolicy, order_queue

_COLUMNS = ("arrivals", "prefix_lens", "num_tokens", "max_new_tokens", "ranks", "queued_at", "clocks")
USES_PREFIXES = (*CACHE_AWARE, "hrrn", "shortest-prefill-first")


class WaitingQueue:
    """Iterates in the order of arrival; ``ordered`` follows the policy."""

    def __init__(self, policy: SchedulePolicy, cache: PrefixCache) -> None:
        self.policy = policy
        self._reqs: list[Req] = []
        self._index: dict[int, int] = {}  # arrival -> index
        self._columns = {name: np.zeros(64, np.int64) for name in _COLUMNS}
        self._watch: PrefixWatch | None = None
        if isinstance(cache, RadixCache) and policy.name in USES_PREFIXES:
            self._watch = cache.watch()
        self._step = 0
        self._clock = 0  # tokens processed so far, the engine's only measure of time

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(sorted(self._reqs, key=lambda req: req.arrival))

    def unordered(self) -> Sequence[Req]:
        """The waiting requests in no order, as they lie."""
        return self._reqs

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return int(self._columns["num_tokens"][: len(self._reqs)].sum())

    def tick(self, num_tokens: int) -> None:
        """A step with so many tokens was launched."""
        self._clock += num_tokens

    def add(self, req: Req) -> None:
        """Queue a request, or take one back that was retracted."""
        index = len(self._reqs)
        self._index[req.arrival] = index
        self._reqs.append(req)
        columns = self._columns
        if index == len(columns["arrivals"]):
            for name in _COLUMNS:
                columns[name] = np.resize(columns[name], 2 * index)
        columns["arrivals"][index] = req.arrival
        columns["num_tokens"][index] = req.num_tokens
        columns["max_new_tokens"][index] = req.max_new_tokens
        columns["ranks"][index] = self.policy.rank_of(req.priority)
        columns["queued_at"][index] = self._step
        columns["clocks"][index] = self._clock
        columns["prefix_lens"][index] = self._watch.add(req.arrival, req.key, req.matchable) if self._watch else 0

    def remove(self, req: Req) -> None:
        """A request leaves the queue."""
        index = self._index.pop(req.arrival)
        last = self._reqs.pop()
        if last is not req:
            self._reqs[index] = last
            self._index[last.arrival] = index
            for column in self._columns.values():
                column[index] = column[len(self._reqs)]
        if self._watch:
            self._watch.discard(req.arrival)

    def ordered(self, running_keys: dict[str, int]) -> Iterator[Req]:
        """The waiting requests, first to serve first. Counts as a scheduling pass."""
        self._step += 1
        view = self._view(running_keys)
        for index in order_queue(self.policy, view).tolist():
            yield self._reqs[index]

    def worst(self) -> Req:
        """The request that would give way if the queue were too long: lowest priority, then newest."""
        size = len(self._reqs)
        ranks, arrivals = self._columns["ranks"][:size], self._columns["arrivals"][:size]
        return self._reqs[int(np.lexsort((-arrivals, ranks))[0])]

    def _view(self, running_keys: dict[str, int]) -> QueueView:
        size, name = len(self._reqs), self.policy.name
        columns = {column: values[:size] for column, values in self._columns.items()}
        ends = {}
        if self._watch:
            for arrival, length in self._watch.refresh().items():
                columns["prefix_lens"][self._index[arrival]] = length
            ends = self._watch.ends() if name == "dfs-weight" else {}
        return QueueView(
            arrivals=columns["arrivals"],
            prefix_lens=columns["prefix_lens"],
            num_tokens=columns["num_tokens"],
            max_new_tokens=columns["max_new_tokens"],
            ranks=columns["ranks"],
            waited=self._step - columns["queued_at"],
            clocks=columns["clocks"],
            clock=self._clock,
            step=self._step,
            ends=[ends[req.arrival] for req in self._reqs] if ends else [None] * size if name == "dfs-weight" else (),
            routing_keys=[req.routing_key for req in self._reqs] if name == "routing-key" else (),
            running_keys=running_keys,
        )
