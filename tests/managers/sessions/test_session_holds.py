"""What streaming sessions hold in the scheduler: it outlives pressure, not its budget, and starves nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, expected, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.invariants import check_memory


def whole_pages(harness: Harness, length: int) -> int:
    page_size = harness.memory.allocator.page_size
    return length // page_size * page_size


def turn(harness: Harness, rid: str, context: list[int], session: str = "s", **options: Any) -> list[int]:
    """Run one turn; the context after it."""
    harness.submit(rid, context, session_hold=session, **options)
    harness.drain()
    return context + harness.ids[rid]


def flood(harness: Harness, tag: str) -> None:
    """Other prompts, several times as long as the pool all together."""
    for i in range(12):
        harness.submit(f"{tag}{i}", prompt_of(1000 + i, 100))
        harness.drain()


@pytest.mark.parametrize("session", ["s", ""])
def test_history_outlives_pressure_only_in_a_session(make: Any, session: str) -> None:
    harness = make(total=512)
    context = prompt_of(1, 60)
    for i in range(4):
        flood(harness, f"flood{i}-")
        before = len(context)
        context = turn(harness, f"t{i}", [*context, *prompt_of(i, 10)], session, ignore_eos=True)
        if i:
            cached = whole_pages(harness, before - 1) if session else 0
            assert harness.cached[f"t{i}"] == cached
        assert harness.ids[f"t{i}"] == context[-8:]
    assert bool(harness.memory.cache.protected_size) == bool(session)
    assert harness.memory.holds.num_tokens == (whole_pages(harness, len(context) - 1) if session else 0)


def test_release_unlocks_and_keeps_the_cache(make: Any) -> None:
    harness = make()
    context = turn(harness, "a", prompt_of(1, 70))
    held = harness.memory.holds.num_tokens
    assert held == harness.memory.cache.protected_size == whole_pages(harness, len(context) - 1)
    evictable = harness.memory.cache.evictable_size
    harness.memory.holds.release("s")
    harness.memory.holds.release("s")
    harness.memory.holds.release("unknown")
    assert harness.memory.cache.protected_size == harness.memory.holds.num_tokens == 0
    assert harness.memory.cache.evictable_size == evictable + held
    turn(harness, "b", context, session="")
    assert harness.cached["b"] == held


def test_budget_drops_the_oldest(make: Any) -> None:
    harness = make(total=1024, session_hold_fraction=0.25)
    contexts = {name: turn(harness, f"{name}0", prompt_of(i, 72), name, ignore_eos=True) for i, name in enumerate("abc")}
    assert len(harness.memory.holds) == 3
    contexts["a"] = turn(harness, "a1", contexts["a"], "a", ignore_eos=True)
    contexts["d"] = turn(harness, "d0", prompt_of(9, 72), "d", ignore_eos=True)
    assert list(harness.memory.holds._holds) == ["c", "a", "d"], "b was renewed least recently"
    assert harness.memory.holds.num_tokens <= 256
    turn(harness, "long", prompt_of(5, 300), "a")
    assert len(harness.memory.holds) == 3, "a turn beyond the whole budget is not held, what was before it is"
    assert harness.memory.holds.num_tokens <= 256


def test_no_budget_no_holds(make: Any) -> None:
    harness = make(session_hold_fraction=0.0)
    turn(harness, "a", prompt_of(1, 70))
    assert harness.memory.cache.protected_size == 0


@pytest.mark.parametrize("chunk", [-1, 64])
def test_a_request_that_is_alone_gets_the_whole_pool(make: Any, chunk: int) -> None:
    harness = make(total=512, session_hold_fraction=1.0, chunked_prefill_size=chunk)
    for i in range(4):
        turn(harness, f"t{i}", prompt_of(i, 100), f"s{i}")
    assert harness.memory.cache.protected_size > 350
    limit = harness.info.max_req_input_len
    long = prompt_of(7, limit - 8)
    harness.submit("long", long)
    harness.drain()
    assert harness.ids["long"] == expected(long, 8)
    assert harness.reasons["long"].status_code is None


def test_as_few_as_needed_are_dropped(make: Any) -> None:
    harness = make(total=512, session_hold_fraction=1.0)
    for i in range(4):
        turn(harness, f"t{i}", prompt_of(i, 100), f"s{i}")
    harness.submit("new", prompt_of(9, 150))
    harness.drain()
    assert list(harness.memory.holds._holds) == ["s2", "s3"] or list(harness.memory.holds._holds) == ["s1", "s2", "s3"]


def test_a_request_that_grows_into_what_is_held_goes_on(make: Any) -> None:
    """A turn that ends beside a long output holds what that output counted on: the hold goes, not the request."""
    harness = make(total=256, session_hold_fraction=1.0)
    prompt = prompt_of(1, 20)
    harness.submit("grows", prompt, max_new_tokens=200, ignore_eos=True)
    harness.turn(2)
    harness.submit("turn", prompt_of(2, 50), session_hold="s")
    for _ in range(60):
        harness.turn()
        if "turn" in harness.reasons:
            break
    assert len(harness.memory.holds) == 1
    harness.drain()
    ids = harness.ids["grows"]
    assert len(ids) == 200
    assert len(harness.memory.holds) == 0


def test_an_aborted_turn_leaves_the_hold_before_it(make: Any) -> None:
    harness = make()
    context = turn(harness, "a", prompt_of(1, 70))
    held = harness.memory.holds.num_tokens
    harness.submit("b", [*context, *prompt_of(2, 40)], max_new_tokens=50, ignore_eos=True, session_hold="s")
    harness.turn(5)
    assert harness.abort("b")
    harness.drain()
    assert harness.memory.holds.num_tokens == harness.memory.cache.protected_size == held


def test_a_step_that_fails_leaves_the_hold_before_it(make: Any) -> None:
    harness = make()
    context = turn(harness, "a", prompt_of(1, 70))
    held = harness.memory.holds.num_tokens
    harness.submit("b", [*context, *prompt_of(2, 40)], session_hold="s")
    harness.turn()
    harness.scheduler.finish(harness.scheduler.live["b"], share=False)
    harness.drain()
    assert harness.memory.holds.num_tokens == harness.memory.cache.protected_size == held


def test_retraction_changes_no_turn(make: Any) -> None:
    harness = make(total=512, faults={"retract_every": 3})
    contexts = {f"s{i}": prompt_of(i, 30) for i in range(4)}
    for number in range(3):
        for session, context in contexts.items():
            harness.submit(f"{session}-{number}", context, session_hold=session, ignore_eos=True)
        harness.drain()
        for session, context in contexts.items():
            ids = harness.ids[f"{session}-{number}"]
            assert len(ids) == 8
            contexts[session] = context + ids
    solo = make()
    for session, context in contexts.items():
        solo.submit(session, context[:30], max_new_tokens=24, ignore_eos=True)
    solo.drain()
    assert {session: context[30:] for session, context in contexts.items()} == solo.ids


def test_broken_books_are_repaired_with_what_sessions_hold(make: Any) -> None:
    harness = make()
    turn(harness, "a", prompt_of(1, 70))
    harness.memory.allocator.alloc_extend(np.array([0], np.int32), np.array([16], np.int32), np.array([0], np.int32))
    check_memory(harness.memory, strict=False)
    assert harness.memory.holds.num_tokens == harness.memory.cache.protected_size == 0
    check_memory(harness.memory, strict=True)
    turn(harness, "b", prompt_of(1, 70))


def test_without_a_cache_nothing_is_held(make: Any) -> None:
    harness = make(disable_radix_cache=True)
    turn(harness, "a", prompt_of(1, 70))
    assert len(harness.memory.holds) == 0


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_mixture_leaves_the_books_in_order(folder: Any, data: st.DataObject) -> None:
    """Turns, plain requests, aborts and closes in any order on a small pool; the books are checked after every step."""
    overlap, page_size = data.draw(st.sampled_from([(False, 1), (True, 16), (True, 1)]))
    fraction = data.draw(st.sampled_from([0.3, 1.0]))
    harness = Harness(folder, overlap=overlap, page_size=page_size, total=320, session_hold_fraction=fraction)
    try:
        _mix(harness, data)
        harness.drain()
        assert all(reason.status_code is None for reason in harness.reasons.values())
        harness.memory.holds.clear()
        assert harness.memory.cache.protected_size == 0
    finally:
        harness.close()


def _mix(harness: Harness, data: st.DataObject) -> None:
    contexts = {name: prompt_of(index, 20) for index, name in enumerate("abc")}
    running: dict[str, str] = {}
    for number in range(data.draw(st.integers(5, 25))):
        for name, rid in list(running.items()):
            if rid in harness.reasons:
                del running[name]
                if len(contexts[name]) < 150:
                    contexts[name] = contexts[name] + harness.ids[rid]
        name = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(["turn", "turn", "plain", "abort", "close"])):
            case "turn" if name not in running:
                running[name] = f"{name}{number}"
                harness.submit(running[name], contexts[name], session_hold=name, ignore_eos=True)
            case "plain":
                harness.submit(f"plain{number}", prompt_of(100 + number, 60))
            case "abort" if name in running:
                harness.abort(running[name])
            case "close":
                harness.memory.holds.release(name)
        harness.turn(data.draw(st.integers(0, 6)))
