"""Orders of the waiting queue, with results worked out by hand, and preemption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.managers.schedule_policy import POLICIES, QueueView, SchedulePolicy, order_queue, plan_preemption


class Node:
    def __init__(self, parent: Node | None) -> None:
        self.parent = parent


def view(num: int = 4, **changes: Any) -> QueueView:
    columns: dict[str, Any] = {
        "arrivals": np.arange(num),
        "prefix_lens": np.zeros(num, np.int64),
        "num_tokens": np.full(num, 10),
        "max_new_tokens": np.full(num, 5),
        "ranks": np.zeros(num, np.int64),
        "waited": np.zeros(num, np.int64),
        "clocks": np.zeros(num, np.int64),
        "clock": 0,
        "step": 1,
        "ends": [None] * num,
        "routing_keys": [""] * num,
    }
    return QueueView(
        **{
            **columns,
            **{k: np.array(v) if isinstance(v, list) and k not in ("ends", "routing_keys") else v for k, v in changes.items()},
        }
    )


def order(name: str, queue: QueueView, **options: Any) -> list[int]:
    return order_queue(SchedulePolicy(name=name, **options), queue).tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_orders_everyone_once(name: str) -> None:
    assert sorted(order(name, view(7))) == list(range(7))
    assert order(name, view(0)) == []
    if name != "random":
        assert order(name, view(3, arrivals=[5, 1, 3])) == [1, 2, 0], "equals go by arrival"


def test_lpm_lof_and_shortest_prefill() -> None:
    queue = view(prefix_lens=[0, 8, 4, 8], num_tokens=[10, 100, 12, 20], max_new_tokens=[1, 9, 9, 2])
    assert order("lpm", queue) == [1, 3, 2, 0]
    assert order("lof", queue) == [1, 2, 3, 0]
    assert order("shortest-prefill-first", queue) == [2, 0, 3, 1]


def test_hrrn_weighs_waiting_against_need() -> None:
    """Waited 100, 90, 90, 0 tokens of work; needs 100, 10, 90, 1."""
    assert order("hrrn", view(clock=100, clocks=[0, 10, 10, 100], num_tokens=[100, 10, 90, 1])) == [1, 0, 2, 3]


def test_random_is_a_function_of_seed_and_pass() -> None:
    assert order("random", view(50, step=3), seed=1) == order("random", view(50, step=3), seed=1)
    assert order("random", view(50, step=3), seed=1) != order("random", view(50, step=4), seed=1)
    assert order("random", view(50, step=3), seed=1) != order("random", view(50, step=3), seed=2)


def test_routing_keys_that_run_go_first() -> None:
    queue = view(6, routing_keys=["", "a", "b", "c", "a", "b"])
    assert order("routing-key", queue.__class__(**{**as_dict(queue), "running_keys": {"b": 3, "a": 1}})) == [2, 5, 1, 4, 0, 3]


def test_dfs_weight_keeps_branches_together_and_heavy_ones_first() -> None:
    root = Node(None)
    left, right = Node(root), Node(root)
    deep, other = Node(right), Node(right)
    queue = view(6, ends=[left, deep, None, other, deep, right])
    assert order("dfs-weight", queue) == [1, 4, 3, 5, 0, 2]


def test_priorities_rank_above_the_policy() -> None:
    queue = view(prefix_lens=[9, 1, 5, 0], ranks=[0, 7, 0, 7])
    assert order("lpm", queue, by_priority=True) == [1, 3, 0, 2]
    assert order("lpm", queue) == [0, 2, 1, 3]
    assert order("priority", queue) == [1, 3, 0, 2]


def test_ranks_of_priorities() -> None:
    policy = SchedulePolicy(by_priority=True)
    assert policy.rank_of(5) > policy.rank_of(0) > policy.rank_of(-5) > policy.rank_of(None)
    low = SchedulePolicy(by_priority=True, low_values_first=True, default_priority=3)
    assert low.rank_of(1) > low.rank_of(2) > low.rank_of(None) > low.rank_of(4)
    assert SchedulePolicy().rank_of(5) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_no_one_waits_longer_than_the_bound(name: str) -> None:
    queue = view(4, waited=[0, 64, 99, 63], prefix_lens=[50, 0, 0, 60], ranks=[9, 0, 0, 9], arrivals=[4, 2, 1, 3])
    assert order(name, queue, by_priority=True, max_wait_steps=64)[:2] == [2, 1]


@given(st.sampled_from([name for name in POLICIES if name != "random"]), st.data())
def test_the_order_does_not_depend_on_the_order_of_the_columns(name: str, data: Any) -> None:
    num = data.draw(st.integers(1, 12))
    small = st.lists(st.integers(0, 3), min_size=num, max_size=num)
    columns = {key: data.draw(small) for key in ("prefix_lens", "max_new_tokens", "ranks", "clocks")}
    queue = view(num, clock=5, **columns)
    shuffle = np.array(data.draw(st.permutations(range(num))))
    mixed = QueueView(**{key: value[shuffle] if isinstance(value, np.ndarray) else value for key, value in as_dict(queue).items()})
    policy = SchedulePolicy(name=name, by_priority=True)
    assert shuffle[order_queue(policy, mixed)].tolist() == order_queue(policy, queue).tolist()


def as_dict(queue: QueueView) -> dict[str, Any]:
    return {name: getattr(queue, name) for name in QueueView.__slots__}


def test_preemption_takes_the_worst_and_newest_and_only_enough() -> None:
    ranks, freed = np.array([5, 1, 9, 1, 30]), np.array([10, 10, 10, 10, 10])
    assert plan_preemption(5, 20, 10, ranks, freed) == [3]
    assert plan_preemption(25, 20, 10, ranks, freed) == [3, 1, 0]
    assert plan_preemption(100, 20, 10, ranks, freed) == [], "not enough: nobody is displaced"
    assert plan_preemption(5, 11, 10, ranks, freed) == [], "a difference of exactly the threshold displaces nobody"
    assert plan_preemption(5, 12, 10, ranks, freed) == [3]
