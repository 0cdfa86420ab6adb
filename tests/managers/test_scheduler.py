"""The scheduler over the token oracle, turn by turn: every phase of a request can be reached exactly, without a sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import EOS, SCRIPT, Harness, expected, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.event_loop import OverlapLoop
from banyan.managers.invariants import MemoryBreach, check_memory
from banyan.managers.io_struct import FinishReason


def test_outputs_follow_from_the_context_alone(make: Any) -> None:
    harness = make()
    prompts = {f"r{i}": prompt_of(i, 5 + 13 * i) for i in range(12)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, max_new_tokens=20)
    harness.drain()
    for rid, prompt in prompts.items():
        assert harness.ids[rid] == expected(prompt, 20)
        assert harness.reasons[rid].kind == ("stop" if harness.ids[rid][-1] == EOS else "length")


@pytest.mark.parametrize(
    "options",
    [{"chunked_prefill_size": 32}, {"chunked_prefill_size": -1}, {"disable_radix_cache": True}, {"schedule_policy": "lpm"}],
)
def test_outputs_do_not_depend_on_options(make: Any, options: dict[str, Any]) -> None:
    harness = make(**options)
    shared = prompt_of(99, 100)
    prompts = {f"r{i}": shared[: 20 * (i % 6)] + prompt_of(i, 30) for i in range(10)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, max_new_tokens=10, stream=True)
        harness.turn()
    harness.drain()
    assert harness.ids == {rid: expected(prompt, 10) for rid, prompt in prompts.items()}


@pytest.mark.parametrize("faults", [{"retract_every": 3}, {"alloc_fail": 0.7}, {"retract_every": 2, "alloc_fail": 0.4}])
def test_outputs_survive_retraction(make: Any, faults: dict[str, float]) -> None:
    harness = make(faults=faults, chunked_prefill_size=32)
    prompts = {f"r{i}": prompt_of(i, 40) for i in range(10)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        harness.submit(rid, prompt, max_new_tokens=25, stream=bool(i % 2))
    harness.drain()
    assert harness.scheduler.stats.num_retracted > 0
    assert harness.ids == {rid: expected(prompt, 25) for rid, prompt in prompts.items()}


def test_a_pool_too_small_for_all_retracts_and_loses_nothing(make: Any) -> None:
    harness = make(total=256, schedule_conservativeness=0.1)
    prompts = {f"r{i}": prompt_of(i, 20) for i in range(8)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, max_new_tokens=100, ignore_eos=True)
    harness.drain()
    assert harness.scheduler.stats.num_retracted > 0
    for rid, prompt in prompts.items():
        assert len(harness.ids[rid]) == 100
        stop = expected(prompt, 100)
        assert harness.ids[rid][: len(stop)] == stop


def given_up(harness: Any, **prompts: list[int]) -> list[bool]:
    """Of each step that these requests take: nobody waits for it when it is absorbed."""
    absorb, found = harness.scheduler.absorb, []

    def note(batch: Any, handle: Any) -> None:
        found.append(bool(batch.step.stop[0]))
        absorb(batch, handle)

    harness.scheduler.absorb = note
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, max_new_tokens=30)
    harness.drain()
    assert harness.ids == {rid: expected(prompt, 30) for rid, prompt in prompts.items()}
    return found


def test_a_step_beyond_the_end_of_all_its_requests_is_given_up(make: Any) -> None:
    stops = next(prompt for prompt in (prompt_of(i, 20) for i in range(1000)) if 2 < len(expected(prompt, 29)) < 29)
    goes_on = next(prompt for prompt in (prompt_of(i, 20) for i in range(1000)) if expected(prompt, 30)[-1] != EOS)
    overlap = isinstance(make().loop, OverlapLoop)
    num_steps = len(expected(stops, 30))
    assert given_up(make(), a=stops) == [False] * num_steps + [True] * overlap
    assert given_up(make(), b=goes_on) == [False] * 30, "that its length ends it is known before"
    assert given_up(make(), a=stops, b=goes_on) == [False] * 30, "another goes on"


def test_second_request_hits_the_shared_prefix(make: Any) -> None:
    harness = make()
    page = harness.info.page_size
    shared = prompt_of(1, 1000)
    harness.submit("a", [*shared, 7])
    harness.drain()
    harness.submit("b", [*shared, 9])
    harness.drain()
    assert harness.cached == {"a": 0, "b": 1000 // page * page}
    assert harness.ids["b"] == expected([*shared, 9], 8)


def test_the_key_separates_tenants(make: Any) -> None:
    harness = make()
    prompt = prompt_of(1, 64)
    for rid, key in [("a", "x"), ("b", "y"), ("c", "x")]:
        harness.submit(rid, [*prompt, 5], extra_key=key)
        harness.drain()
    assert harness.cached["b"] == 0
    assert harness.cached["c"] == 64


@pytest.mark.parametrize("max_new_tokens", [0, 1])
def test_requests_that_end_with_their_prompt_free_their_rows(make: Any, max_new_tokens: int) -> None:
    harness = make(max_running_requests=2)
    for i in range(5):
        harness.submit(f"r{i}", prompt_of(i, 10), max_new_tokens=max_new_tokens)
    harness.drain(limit=30)
    assert all(harness.reasons[f"r{i}"] == FinishReason(kind="length", length=max_new_tokens) for i in range(5))


def test_scripts_end_by_eos_stop_token_or_length(make: Any) -> None:
    harness = make()
    script = [SCRIPT, 6, 10, 11, 12, 13, 14, 15]
    harness.submit("eos", script, max_new_tokens=20)
    harness.submit("token", script, max_new_tokens=20, stop_token_ids=[12])
    harness.submit("length", script, max_new_tokens=4)
    harness.submit("ignore", [SCRIPT, 3, 10, EOS, 11], max_new_tokens=3, ignore_eos=True)
    harness.drain()
    assert harness.ids == {
        "eos": [10, 11, 12, 13, 14, 15, EOS],
        "token": [10, 11, 12],
        "length": [10, 11, 12, 13],
        "ignore": [10, EOS, 11],
    }
    assert harness.reasons["eos"] == FinishReason(kind="stop", matched=EOS)
    assert harness.reasons["token"] == FinishReason(kind="stop", matched=12)
    assert harness.reasons["length"] == FinishReason(kind="length", length=4)


def test_min_new_tokens_bans_every_stop_token(make: Any) -> None:
    harness = make()
    harness.submit("r", [SCRIPT, 4, EOS, 12, 10, 12], max_new_tokens=20, min_new_tokens=2, stop_token_ids=[12])
    harness.drain()
    assert harness.ids["r"] == [EOS + 1, 13, 10, 12]


@pytest.mark.parametrize("turns", range(12))
def test_abort_in_every_phase(make: Any, turns: int) -> None:
    """Queued, between two chunks, launched and not absorbed, decoding, finished: the others' output is what it was."""
    harness = make(chunked_prefill_size=32, max_running_requests=2)
    prompts = {f"r{i}": prompt_of(i, 90) for i in range(4)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, stream=True)
    harness.turn(turns)
    abort = FinishReason(kind="abort", message="test")
    aborted = [rid for rid in ("r0", "r3") if harness.scheduler.abort(rid, abort)]
    assert not harness.scheduler.abort("r", abort), "only the exact rid matches"
    harness.drain()
    for rid, prompt in prompts.items():
        full = expected(prompt, 8)
        if rid in aborted:
            assert harness.reasons[rid] == abort
            assert harness.ids[rid] == full[: len(harness.ids[rid])]
        else:
            assert harness.ids[rid] == full
    harness.submit("again", prompts["r0"])
    harness.drain()
    assert harness.ids["again"] == expected(prompts["r0"], 8)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_failing_step_fails_its_own_requests_only(make: Any, step: int) -> None:
    harness = make(faults={"step_fail": step}, max_running_requests=2)
    for i in range(6):
        harness.submit(f"r{i}", prompt_of(i, 20))
    harness.drain()
    failed = [rid for rid, reason in harness.reasons.items() if reason.status_code == 500]
    assert 0 < len(failed) <= 2
    for i in range(6):
        if f"r{i}" not in failed:
            assert harness.ids[f"r{i}"] == expected(prompt_of(i, 20), 8)


def test_stream_interval_delays_rows_but_loses_none(make: Any) -> None:
    harness = make()
    harness.submit("r", prompt_of(5, 20), stream=True, max_new_tokens=11, stream_interval=4)
    harness.drain()
    assert harness.ids["r"] == expected(prompt_of(5, 20), 11)


def test_lpm_serves_the_longest_cached_prefix_first(make: Any) -> None:
    harness = make(schedule_policy="lpm", max_running_requests=1)
    harness.submit("warm", prompt_of(1, 64))
    harness.drain()
    harness.submit("cold", prompt_of(2, 64))
    harness.submit("hot", prompt_of(1, 64) + prompt_of(3, 8))
    harness.drain()
    assert list(harness.reasons) == ["warm", "hot", "cold"]


@settings(max_examples=25, deadline=None)
@given(
    mode=st.tuples(st.booleans(), st.sampled_from([1, 4, 16]), st.sampled_from([0, 3])),
    radix_off=st.booleans(),
    chunk=st.sampled_from([-1, 16, 64]),
    actions=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(0, 20), st.integers(0, 4)), max_size=15),
)
def test_random_traffic(folder: Path, mode: tuple[bool, int, int], radix_off: bool, chunk: int, actions: Any) -> None:
    overlap, page_size, retract_every = mode
    harness = Harness(
        folder,
        overlap=overlap,
        page_size=page_size,
        faults={"retract_every": retract_every} if retract_every else {},
        total=512,
        disable_radix_cache=radix_off,
        chunked_prefill_size=chunk,
    )
    prompts = {}
    abort = FinishReason(kind="abort", message="test")
    for i, (family, length, num_new, turns) in enumerate(actions):
        rid = f"r{i}"
        prompts[rid] = (prompt_of(family, 100)[:length], num_new)
        harness.submit(rid, prompts[rid][0], max_new_tokens=num_new, stream=bool(i % 2))
        harness.turn(turns)
        if turns == 4:
            harness.scheduler.abort(f"r{i // 2}", abort)
    harness.drain()
    harness.close()
    for rid, (prompt, num_new) in prompts.items():
        full = expected(prompt, num_new)
        assert harness.ids[rid] == (full[: len(harness.ids[rid])] if harness.reasons[rid].kind == "abort" else full)


def test_a_breach_is_found_and_repaired(make: Any) -> None:
    harness = make()
    harness.submit("a", prompt_of(1, 50))
    harness.drain()
    harness.memory.allocator.alloc_extend(np.array([0]), np.array([harness.info.page_size]), np.array([0]))
    with pytest.raises(MemoryBreach, match="slots do not balance"):
        check_memory(harness.memory, strict=True)
    check_memory(harness.memory, strict=False)
    harness.submit("b", prompt_of(1, 50))
    harness.drain()
    assert harness.cached["b"] == 0
    assert harness.ids["b"] == expected(prompt_of(1, 50), 8)
