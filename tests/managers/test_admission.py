"""Who is admitted when: shared prefixes in one queue, mixed steps, decode intervals, priorities, preemption, the waiting bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import expected, prompt_of

from banyan.managers.prefill_planner import MAX_WAITS
from banyan.managers.schedule_policy import POLICIES
from banyan.model_executor.step import ForwardMode, StepInput


class Steps(list[StepInput]):
    """The steps that a harness launched."""

    def __init__(self, harness: Any) -> None:
        launch = harness.runner.launch

        def record(step: StepInput) -> Any:
            self.append(step)
            return launch(step)

        harness.runner.launch = record

    def modes(self) -> str:
        return "".join(step.mode.name[0] for step in self)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [-1, 64])
def test_every_policy_gives_the_same_text(make: Any, policy: str, chunk: int) -> None:
    harness = make(schedule_policy=policy, chunked_prefill_size=chunk, max_running_requests=3)
    shared = prompt_of(99, 100)
    prompts = {f"r{i}": shared[: 30 * (i % 4)] + prompt_of(i, 25) for i in range(9)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, max_new_tokens=6, routing_key=rid[-1:])
    harness.drain()
    assert harness.ids == {rid: expected(prompt, 6) for rid, prompt in prompts.items()}


@pytest.mark.parametrize("chunk", [-1, 64])
def test_of_many_that_share_an_uncached_prefix_one_computes_it(make: Any, chunk: int) -> None:
    harness = make(chunked_prefill_size=chunk)
    shared = prompt_of(7, 160)
    for i in range(6):
        harness.submit(f"r{i}", shared + prompt_of(i, 10))
    harness.submit("other", prompt_of(50, 40))
    harness.drain()
    assert harness.cached == {"r0": 0, **{f"r{i}": 160 for i in range(1, 6)}, "other": 0}
    assert all(harness.ids[f"r{i}"] == expected(shared + prompt_of(i, 10), 8) for i in range(6))


def test_a_few_shared_tokens_are_computed_once_too(make: Any) -> None:
    """What is shared counts in whole pages: nobody waits for less than one."""
    harness = make()
    steps, page_size = Steps(harness), harness.memory.allocator.page_size
    shared = prompt_of(7, 20)
    for i in range(4):
        harness.submit(f"r{i}", [*shared, 100 + i], max_new_tokens=1)
    harness.drain()
    found = 20 // page_size * page_size
    assert harness.cached == {"r0": 0, "r1": found, "r2": found, "r3": found}
    assert [len(step.rows) for step in steps] == [1, 3]
    del steps[:]
    for i in range(4):
        harness.submit(f"s{i}", [*prompt_of(8, 3), 100 + i], max_new_tokens=1)
    harness.drain()
    assert [len(step.rows) for step in steps] == [4], "three tokens are not worth a step"


def test_nobody_is_passed_over_for_little_again_and_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shares a little more with the one before it than with the others."""
    monkeypatch.setattr("banyan.managers.prefill_planner.WORTH_ANY_WAIT", 1000)
    harness = make(max_running_requests=12)
    steps, page_size = Steps(harness), harness.memory.allocator.page_size
    more = max(page_size, 4)
    shared = prompt_of(7, (MAX_WAITS + 2) * more)
    for i in range(MAX_WAITS + 2):
        harness.submit(f"r{i}", [*shared[: (i + 1) * more], 100 + i], max_new_tokens=1)
    harness.drain()
    assert [len(step.rows) for step in steps] == [1] * MAX_WAITS + [2]


def test_how_much_is_worth_a_step_is_an_option(make: Any) -> None:
    harness = make(shared_prefix_min=64)
    steps, shared = Steps(harness), prompt_of(7, 63)
    for i in range(3):
        harness.submit(f"r{i}", [*shared, 100 + i], max_new_tokens=1)
    harness.drain()
    assert [len(step.rows) for step in steps] == [3]


def test_no_one_waits_for_a_prefix_of_another_tenant(make: Any) -> None:
    harness = make()
    steps = Steps(harness)
    shared = prompt_of(7, 160)
    harness.submit("a", [*shared, 5], extra_key="x")
    harness.submit("b", [*shared, 5], extra_key="y")
    harness.turn()
    assert len(steps[0].rows) == 2
    harness.drain()


def test_a_request_is_served_when_the_one_it_waits_for_is_aborted(make: Any) -> None:
    harness = make(chunked_prefill_size=32)
    shared = prompt_of(7, 160)
    harness.submit("a", [*shared, 5])
    harness.submit("b", [*shared, 6])
    harness.turn(2)
    harness.abort("a")
    harness.drain()
    assert harness.ids["b"] == expected([*shared, 6], 8)


def test_mixed_steps_decode_beside_a_long_prompt(make: Any) -> None:
    harness = make(enable_mixed_chunk=True, chunked_prefill_size=32)
    steps = Steps(harness)
    harness.submit("a", prompt_of(1, 20), max_new_tokens=30, ignore_eos=True, stream=True)
    harness.turn(3)
    harness.submit("long", prompt_of(2, 300))
    before = len(harness.ids["a"])
    harness.turn(8)
    assert len(harness.ids["a"]) >= before + 7, "a stream gets a token in every step"
    assert "M" in steps.modes()
    assert all(len(step.input_ids) <= 32 for step in steps)
    harness.drain()
    assert harness.ids["a"][: len(expected(prompt_of(1, 20), 30))] == expected(prompt_of(1, 20), 30)
    assert harness.ids["long"] == expected(prompt_of(2, 300), 8)


@pytest.mark.parametrize("options", [{}, {"disable_radix_cache": True}, {"total": 320}])
def test_mixed_steps_change_no_output_and_lose_no_slot(make: Any, options: dict[str, Any]) -> None:
    harness = make(enable_mixed_chunk=True, chunked_prefill_size=32, faults={"retract_every": 5}, **options)
    prompts = {f"r{i}": prompt_of(i, 10 + 9 * i) for i in range(12)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        harness.submit(rid, prompt, max_new_tokens=12, stream=bool(i % 2))
        harness.turn(i % 3)
    harness.drain()
    assert harness.ids == {rid: expected(prompt, 12) for rid, prompt in prompts.items()}


def test_decode_interval_lets_streams_decode_between_chunks(make: Any) -> None:
    harness = make(prefill_decode_interval=3, chunked_prefill_size=32)
    steps = Steps(harness)
    harness.submit("a", prompt_of(1, 20), max_new_tokens=40, ignore_eos=True)
    harness.turn(2)
    harness.submit("long", prompt_of(2, 160))
    harness.drain()
    assert "EDDDEDDDEDDDE" in steps.modes()
    assert steps[0].mode is ForwardMode.EXTEND


def test_higher_priorities_are_served_first(make: Any) -> None:
    harness = make(enable_priority_scheduling=True, max_running_requests=1, disable_priority_preemption=True)
    for rid, priority in [("first", 0), ("low", 1), ("none", None), ("high", 9), ("low2", 1)]:
        harness.submit(rid, prompt_of(len(rid), 10), priority=priority)
        harness.turn()
    harness.drain()
    assert list(harness.reasons) == ["first", "high", "low", "low2", "none"]


def test_a_high_priority_displaces_a_running_low_one(make: Any) -> None:
    harness = make(enable_priority_scheduling=True, max_running_requests=2)
    for rid in ("low1", "low2"):
        harness.submit(rid, prompt_of(len(rid), 10), priority=0, max_new_tokens=60, ignore_eos=True)
    harness.turn(5)
    harness.submit("equal", prompt_of(30, 10), priority=10, max_new_tokens=4)
    harness.turn(6)
    assert "equal" not in harness.reasons, "a difference of the threshold displaces nobody"
    harness.submit("high", prompt_of(31, 10), priority=11, max_new_tokens=4)
    harness.drain()
    assert list(harness.reasons)[:2] == ["high", "equal"], "what was displaced goes back behind its betters"
    assert len(harness.ids["low1"]) == len(harness.ids["low2"]) == 60
    assert harness.scheduler.stats.num_retracted == 1


def test_preemption_frees_memory_too(make: Any) -> None:
    harness = make(enable_priority_scheduling=True, total=512)
    harness.submit("low", prompt_of(1, 100), priority=0, max_new_tokens=250, ignore_eos=True)
    harness.turn(5)
    harness.submit("high", prompt_of(2, 300), priority=50, max_new_tokens=10)
    harness.drain()
    assert list(harness.reasons) == ["high", "low"]
    assert len(harness.ids["low"]) == 250


def test_no_one_starves(make: Any) -> None:
    """A request of the lowest priority is served within the bound, though better ones keep coming."""
    harness = make(enable_priority_scheduling=True, max_running_requests=1, max_wait_steps=40, disable_priority_preemption=True)
    harness.submit("running", prompt_of(0, 5), priority=9)
    harness.turn()
    harness.submit("poor", prompt_of(1, 5), priority=0, max_new_tokens=1)
    for i in range(80):
        harness.submit(f"rich{i}", prompt_of(2 + i, 5), priority=9, max_new_tokens=1)
        harness.turn()
    assert "poor" in harness.reasons
    assert len(np.unique(list(harness.reasons))) == len(harness.reasons)
    harness.drain()


def test_a_paced_chunk_bounds_prompts_only_beside_streams(make: Any) -> None:
    harness = make(target_itl_ms=50, chunked_prefill_size=256)
    harness.scheduler.planner.limits.shared_chunk = 32
    steps = Steps(harness)
    harness.submit("alone", prompt_of(3, 200), max_new_tokens=1)
    harness.drain()
    assert len(steps[0].input_ids) == 200
    harness.submit("a", prompt_of(1, 20), max_new_tokens=30, ignore_eos=True)
    harness.turn(3)
    del steps[:]
    harness.submit("long", prompt_of(2, 128))
    harness.turn(4)
    assert [len(step.input_ids) for step in steps] == [33] * 4
    harness.drain()
    assert harness.ids["long"] == expected(prompt_of(2, 128), 8)
