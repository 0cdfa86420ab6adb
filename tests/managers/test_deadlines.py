"""Deadlines against a naive model, and what they cost in memory."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from banyan.managers.deadlines import COMPACT_ABOVE, OWN, QUEUE, REASONS, RUNNING, Deadlines, Timers

ACTIONS = st.tuples(st.sampled_from(["arm", "disarm", "pop"]), st.integers(0, 3), st.sampled_from([QUEUE, OWN]), st.integers(0, 20))


@given(st.lists(ACTIONS, max_size=60))
def test_against_a_dict(actions: list[tuple[str, int, str, int]]) -> None:
    deadlines, model = Deadlines(), dict[tuple[str, str], int]()
    for action, number, kind, time in actions:
        key = (f"r{number}", kind)
        if action == "arm":
            deadlines.arm(*key, time)
            model[key] = time
        elif action == "disarm":
            deadlines.disarm(*key)
            model.pop(key, None)
        else:
            popped = []
            while (due := deadlines.pop_due(time)) is not None:
                popped.append(due)
            assert sorted(popped) == sorted(key for key, at in model.items() if at <= time)
            assert [model[key] for key in popped] == sorted(model[key] for key in popped)
            model = {key: at for key, at in model.items() if at > time}
        assert len(deadlines) == len(model)
        assert deadlines.next_due() == min(model.values(), default=math.inf)


def test_of_equal_times_the_first_armed_comes_first() -> None:
    deadlines = Deadlines()
    for rid in "bca":
        deadlines.arm(rid, OWN, 1.0)
    assert [deadlines.pop_due(1.0) for _ in range(4)] == [("b", OWN), ("c", OWN), ("a", OWN), None]


def test_requests_that_end_in_time_leave_nothing_behind() -> None:
    deadlines = Deadlines()
    deadlines.arm("always", OWN, 1e9)
    for index in range(10_000):
        deadlines.arm(f"r{index}", QUEUE, 1e6)
        deadlines.disarm(f"r{index}", QUEUE)
        assert deadlines.size <= 2 * 2 + COMPACT_ABOVE
    assert len(deadlines) == 1
    assert deadlines.next_due() == 1e9


def req(rid: str, timeout: float | None = None) -> Any:
    return SimpleNamespace(rid=rid, timeout=timeout)


def test_timers_without_limits_hold_nothing() -> None:
    timers = Timers()
    timers.arrived(req("a"))
    timers.seated(req("a"))
    assert timers.next_due() == math.inf
    assert timers.pop_due() is None


def test_each_phase_has_its_limit() -> None:
    timers = Timers(queue_timeout=10, running_timeout=20)
    timers.now = 100.0
    timers.arrived(req("a", timeout=50))
    assert timers.next_due() == 110
    timers.now = 105.0
    timers.seated(req("a"))
    assert timers.next_due() == 125
    timers.now = 115.0
    timers.seated(req("a"))  # after a retraction: it goes on counting
    assert timers.next_due() == 125
    timers.now = 125.0
    assert timers.pop_due() == ("a", REASONS[RUNNING])
    assert timers.next_due() == 150
    timers.ended(req("a"))
    assert timers.next_due() == math.inf
