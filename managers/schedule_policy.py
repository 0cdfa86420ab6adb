"""The order of the waiting queue: pure functions of plain numbers, so that every rank orders alike.

Legend: N waiting requests; every array is int64 [N].
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layers.rng import uniforms

CACHE_AWARE = ("lpm", "dfs-weight")
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key", "hrrn", "shortest-prefill-first", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePolicy:
    """How the queue is ordered. Whatever the policy, who has waited max_wait_steps scheduling passes goes first.

    by_priority: higher priorities first (lower with low_values_first), the policy among equals. preemption_threshold: a waiting
    request may displace running ones whose priority is lower by more than this; None: never.
    """

    name: str = "fcfs"
    seed: int = 0
    by_priority: bool = False
    low_values_first: bool = False
    default_priority: int | None = None
    preemption_threshold: int | None = None
    max_wait_steps: int = 4096

    def rank_of(self, priority: int | None) -> int:
        """The priority of a request as a number of which greater is better; without one it ranks below all."""
        if not self.by_priority:
            return 0
        value = priority if priority is not None else self.default_priority
        if value is None:
            return -(1 << 62)
        return -value if self.low_values_first else value


@dataclass(slots=True)
class QueueView:
    """What the waiting requests look like now. clocks: processed tokens of the whole engine when each arrived, and now."""

    arrivals: np.ndarray
    prefix_lens: np.ndarray
    num_tokens: np.ndarray
    max_new_tokens: np.ndarray
    ranks: np.ndarray
    waited: np.ndarray  # scheduling passes since each was queued
    clocks: np.ndarray
    clock: int
    step: int
    ends: Sequence[Any] = ()  # for dfs-weight: the tree node that each match ends in, None at a root
    routing_keys: Sequence[str] = ()  # for routing-key
    running_keys: Mapping[str, int] | None = None  # for routing-key: how often each runs


def order_queue(policy: SchedulePolicy, view: QueueView) -> np.ndarray:
    """Indices of the waiting requests, first to serve first."""
    order = _ORDERS[policy.name](view, policy)
    if policy.by_priority or policy.name == "priority":
        order = order[np.argsort(-view.ranks[order], kind="stable")]
    overdue = np.flatnonzero(view.waited >= policy.max_wait_steps)
    if not len(overdue):
        return order
    overdue = overdue[np.argsort(view.arrivals[overdue], kind="stable")]
    return np.concatenate([overdue, order[~np.isin(order, overdue)]])


def _fcfs(view: QueueView, policy: SchedulePolicy) -> np.ndarray:
    return np.argsort(view.arrivals, kind="stable")


def _lpm(view: QueueView, policy: SchedulePolicy) -> np.ndarray:
    """Longest cached prefix first."""
    return np.lexsort((view.arrivals, -view.prefix_lens))


def _lof(view: QueueView, policy: SchedulePolicy) -> np.ndarray:
    """Longest output first."""
    return np.lexsort((view.arrivals, -view.max_new_tokens))


def _random(view: QueueView, policy: SchedulePolicy) -> np.ndarray:
    """A fresh shuffle each pass, from a hash of (seed, pass, arrival)."""
    seeds = np.full(len(view.arrivals), policy.seed * 1_000_003 + view.step, np.int64)
    return np.argsort(uniforms(seeds, view.arrivals), kind="stable")


def _hrrn(view: QueueView, policy: SchedulePolicy) -> np.ndarray:
    """Highest response ratio next: the tokens that the engine processed while a request waited, per token that it needs."""
    uncached = np.maximum(view.num_tokens - view.prefix_lens, 1)
    return np.lexsort((view.arrivals, -(view.clock - view.clocks) / uncached))


def _shortest_prefill(view: QueueView, policy: SchedulePolicy) -> np.ndarray:
    return np.lexsort((view.arrivals, np.maximum(view.num_tokens - view.prefix_lens, 1)))


def _routing_key(view: QueueView, policy: SchedulePolicy) -> np.ndarray:
    """Keys that run now first, the most frequent before the others; then the rest by arrival."""
    running = view.running_keys or {}
    counts = np.array([running.get(key, 0) if key else 0 for key in view.routing_keys], np.int64)
    ranks: dict[str, int] = {}  # keys that run equally often, by their first request
    for index in _fcfs(view, policy).tolist():
        ranks.setdefault(view.routing_keys[index], len(ranks))
    names = np.array([ranks[key] for key in view.routing_keys], np.int64)
    return np.lexsort((view.arrivals, np.where(counts > 0, names, 0), -counts))


def _dfs_weight(view: QueueView, policy: SchedulePolicy) -> np.ndarray:
    """Depth first through the tree, the branch with most waiting requests first; those at a node come after its branches."""
    weights: Counter[Hashable] = Counter()
    children: defaultdict[Hashable, dict[Any, None]] = defaultdict(dict)
    at: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index in _fcfs(view, policy).tolist():
        node = view.ends[index]
        at[node].append(index)
        while node is not None:
            parent = node.parent if node.parent is not None and node.parent.parent is not None else None
            children[parent].setdefault(node)
            weights[node] += 1
            node = parent
    order: list[int] = []
    stack: list[tuple[Any, bool]] = [(None, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order += at[node]
            continue
        stack.append((node, True))
        branches = sorted(children[node], key=lambda child: -weights[child])
        stack.extend((child, False) for child in reversed(branches))
    return np.array(order, np.int64)


_ORDERS: dict[str, Callable[[QueueView, SchedulePolicy], np.ndarray]] = {
    "fcfs": _fcfs,
    "priority": _fcfs,
    "lpm": _lpm,
    "lof": _lof,
    "random": _random,
    "hrrn": _hrrn,
    "shortest-prefill-first": _shortest_prefill,
    "routing-key": _routing_key,
    "dfs-weight": _dfs_weight,
}


def plan_preemption(need: int, rank: int, threshold: int, ranks: np.ndarray, freed: np.ndarray) -> list[int]:
    """Indices of the running requests that a waiting one of ``rank`` may displace to get ``need`` tokens; [] if that is not enough.

    The worst ranks first, of equals the newest (the arrays are in the order of admission). freed: tokens that each would give
    back. A victim ranks lower by strictly more than the threshold, so equals never displace each other in turn.
    """
    victims: list[int] = []
    for index in np.lexsort((-np.arange(len(ranks)), ranks)).tolist():
        if need <= 0 or rank - int(ranks[index]) <= threshold:
            break
        victims.append(index)
        need -= int(freed[index])
    return victims if need <= 0 else []
