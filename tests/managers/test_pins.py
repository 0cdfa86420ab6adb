"""Cache hints: pinned prompts stay, for their time and within the budget, and never in the way of a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CONFIG, Harness, expected, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.errors import RequestError
from banyan.managers.generation import GenerateInput
from banyan.managers.invariants import MemoryBreach, check_memory
from banyan.managers.io_struct import CacheHint
from banyan.managers.pins import Pins
from banyan.mem_cache.allocator import SlotAllocator
from banyan.mem_cache.prefix_cache import CacheKey, NoPrefixCache

PIN = CacheHint(pin_seconds=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("oracle")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(
    params=[(False, 1), (False, 16), (True, 1), (True, 16)], ids=lambda p: f"{'overlap' if p[0] else 'normal'}-page{p[1]}"
)
def make(request: pytest.FixtureRequest, folder: Path) -> Any:
    overlap, page_size = request.param
    made: list[Harness] = []

    def build(**options: Any) -> Harness:
        made.append(Harness(folder, overlap=overlap, page_size=page_size, **options))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


def run(harness: Harness, rid: str, prompt: list[int], **options: Any) -> int | None:
    harness.submit(rid, prompt, **options)
    harness.drain()
    return harness.reasons[rid].pinned_tokens


def test_a_pinned_prompt_survives_what_evicts_all_else(make: Callable[..., Harness]) -> None:
    harness = make(total=512, pin_budget_fraction=0.5)
    prompts = {rid: prompt_of(seed, 100) for seed, rid in enumerate(["pinned", "plain"])}
    page = harness.info.page_size
    assert run(harness, "pinned", prompts["pinned"], cache_hint=PIN) == 100 // page * page
    assert run(harness, "plain", prompts["plain"]) is None
    assert harness.memory.cache.protected_size == 100 // page * page, "its output is not pinned"
    for seed in range(5, 10):
        run(harness, f"r{seed}", prompt_of(seed, 300))
    run(harness, "pinned again", [*prompts["pinned"], 7])
    run(harness, "plain again", [*prompts["plain"], 7])
    assert harness.cached["pinned again"] == 100 // page * page
    assert harness.cached["plain again"] == 0


def test_pins_expire_by_ticks_alone(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.scheduler.tick(5.0)
    run(harness, "a", prompt_of(1, 64), cache_hint=PIN)
    run(harness, "b", prompt_of(2, 32), cache_hint=CacheHint(pin_seconds=3))
    assert harness.memory.cache.protected_size == 96
    for now, left in [(7.9, 96), (8.0, 64), (14.9, 64), (15.0, 0)]:
        harness.scheduler.tick(now)
        check_memory(harness.memory, strict=True)
        assert (harness.memory.cache.protected_size, harness.memory.pins.num_tokens) == (left, left)


def test_a_prompt_is_pinned_once_until_the_latest_time(make: Callable[..., Harness]) -> None:
    harness = make(total=512)
    prompt = prompt_of(1, 64)
    for rid, seconds in [("a", 5.0), ("b", 20.0), ("c", 1.0)]:
        assert run(harness, rid, prompt, cache_hint=CacheHint(pin_seconds=seconds)) == 64
    assert (len(harness.memory.pins), harness.memory.pins.num_tokens) == (1, 64)
    harness.scheduler.tick(19.9)
    assert len(harness.memory.pins) == 1
    harness.scheduler.tick(20.0)
    assert len(harness.memory.pins) == 0


def test_beyond_the_budget_the_pin_is_refused_and_the_request_served(make: Callable[..., Harness]) -> None:
    harness = make(total=512)
    assert run(harness, "a", prompt_of(1, 96), cache_hint=PIN) == 96
    assert run(harness, "b", prompt_of(2, 64), cache_hint=PIN) == 0
    assert harness.ids["b"] == expected(prompt_of(2, 64), 8)
    assert run(harness, "c", prompt_of(3, 32), cache_hint=PIN) == 32
    harness.scheduler.tick(10.0)
    assert run(harness, "d", prompt_of(2, 64), cache_hint=PIN) == 64


def test_without_a_cache_nothing_is_pinned(make: Callable[..., Harness]) -> None:
    harness = make(disable_radix_cache=True)
    assert run(harness, "a", prompt_of(1, 64), cache_hint=PIN) == 0


def test_pins_give_way_to_a_request_that_fits_the_empty_pool(make: Callable[..., Harness]) -> None:
    harness = make(total=512, pin_budget_fraction=1.0)
    run(harness, "late", prompt_of(1, 96), cache_hint=CacheHint(pin_seconds=50))
    run(harness, "early", prompt_of(2, 96), cache_hint=PIN)
    run(harness, "big", prompt_of(3, 300), max_new_tokens=40)
    assert harness.ids["big"] == expected(prompt_of(3, 300), 40)
    assert len(harness.memory.pins) == 1, "the one that expires first went, and it alone"
    harness.scheduler.tick(49.0)
    assert len(harness.memory.pins) == 1
    run(harness, "huge", prompt_of(4, 470))
    assert len(harness.memory.pins) == 0


def test_decoding_takes_pins_before_it_fails(make: Callable[..., Harness]) -> None:
    harness = make(total=512, pin_budget_fraction=1.0, schedule_conservativeness=0.01)
    for seed in range(3):
        run(harness, f"p{seed}", prompt_of(seed, 96), cache_hint=PIN)
    run(harness, "long", prompt_of(9, 100), max_new_tokens=380, ignore_eos=True)
    assert len(harness.ids["long"]) == 380


def test_an_aborted_request_pins_nothing(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.submit("a", prompt_of(1, 64), cache_hint=PIN, max_new_tokens=100, ignore_eos=True)
    harness.turn(3)
    harness.abort("a")
    harness.drain()
    assert harness.memory.cache.protected_size == 0
    assert harness.reasons["a"].pinned_tokens is None


def test_only_pins_excuse_locked_tokens(make: Callable[..., Harness]) -> None:
    harness = make()
    run(harness, "a", prompt_of(1, 64), cache_hint=PIN)
    check_memory(harness.memory, strict=True)
    harness.memory.cache.hold_prefix(CacheKey(), np.array(prompt_of(1, 64)[:32], np.int32))
    check_memory(harness.memory, strict=True)  # under the pin's lock: nothing more is locked
    run(harness, "b", prompt_of(2, 64))
    harness.memory.cache.hold_prefix(CacheKey(), np.array(prompt_of(2, 64), np.int32))
    with pytest.raises(MemoryBreach, match="128 cached tokens are locked, but requests, sessions and pins hold 64"):
        check_memory(harness.memory, strict=True)
    check_memory(harness.memory, strict=False)
    assert (len(harness.memory.pins), harness.memory.cache.protected_size) == (0, 0)
    harness.drain()


def test_priority_of_the_hint_keeps_a_prompt_longer(make: Callable[..., Harness]) -> None:
    harness = make(total=512, radix_eviction_policy="priority")
    run(harness, "dear", prompt_of(1, 128), cache_hint=CacheHint(priority=5))
    for seed in range(2, 7):
        run(harness, f"r{seed}", prompt_of(seed, 128))
    run(harness, "again", [*prompt_of(1, 128), 5])
    assert harness.cached["again"] == 128


@settings(max_examples=20, deadline=None)
@given(
    overlap=st.booleans(),
    page_size=st.sampled_from([1, 16]),
    actions=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 120), st.sampled_from([0.0, 1.0, 5.0]), st.integers(0, 4)), max_size=14
    ),
)
def test_random_pins_lose_nothing(folder: Path, overlap: bool, page_size: int, actions: list[tuple[int, int, float, int]]) -> None:
    harness = Harness(folder, overlap=overlap, page_size=page_size, total=384, pin_budget_fraction=0.9)
    prompts = {}
    for index, (family, length, seconds, turns) in enumerate(actions):
        prompts[f"r{index}"] = prompt = prompt_of(family, 120)[:length]
        harness.submit(f"r{index}", prompt, cache_hint=CacheHint(pin_seconds=seconds), max_new_tokens=20)
        harness.turn(turns)
        harness.scheduler.tick(float(index))
        assert harness.memory.pins.num_tokens <= harness.memory.pins.budget
        if turns == 4:
            harness.abort(f"r{index // 2}")
    harness.drain()
    for rid, prompt in prompts.items():
        full = expected(prompt, 20)
        assert harness.ids[rid] == (full[: len(harness.ids[rid])] if harness.reasons[rid].kind == "abort" else full)
    harness.scheduler.tick(1000.0)
    check_memory(harness.memory, strict=True)
    assert harness.memory.cache.protected_size == 0
    harness.close()


def test_pins_over_no_cache() -> None:
    pins = Pins(NoPrefixCache(SlotAllocator(16, 1)), 100)
    assert pins.pin(CacheKey(), np.arange(4, dtype=np.int32), 1.0) == 0
    assert not pins.drop_oldest()


@pytest.mark.parametrize(
    "hint",
    [
        {"pin_seconds": -1},
        {"pin_seconds": 1e9},
        {"pin_seconds": "5"},
        {"priority": -1},
        {"priority": 1001},
        {"priority": 1.5},
        {"pin_secs": 1},
        5,
    ],
)
def test_hints_are_typed_and_bounded(hint: Any) -> None:
    with pytest.raises(RequestError, match="cache_hint"):
        GenerateInput.parse({"text": "a", "cache_hint": hint})


def test_a_hint_may_have_either_field() -> None:
    assert GenerateInput.parse({"text": "a", "cache_hint": {"pin_seconds": 5}}).cache_hint == CacheHint(pin_seconds=5)
    assert GenerateInput.parse({"text": "a", "cache_hint": {}}).cache_hint == CacheHint()
