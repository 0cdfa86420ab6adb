"""Admission, retraction and ordering as arithmetic, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.managers.prefill_adder import Admission, Candidate, PrefillBudget, plan_prefill
from banyan.managers.retraction import NewTokenRatio, retraction_order
from banyan.mem_cache.sizing import max_req_len


def budget(**changes: Any) -> PrefillBudget:
    values: dict[str, Any] = {
        "free_tokens": 1000,
        "reserved_tokens": 0.0,
        "input_tokens": 16384,
        "chunk_tokens": None,
        "rows": 8,
        "page_size": 1,
    }
    return PrefillBudget(**{**values, **changes})


def test_admits_in_order_until_one_does_not_fit() -> None:
    queue = [Candidate(100, 0, 0, 200), Candidate(300, 0, 0, 100), Candidate(400, 0, 0, 1), Candidate(1, 0, 0, 1)]
    assert plan_prefill(queue, budget()) == [Admission(0, 0, 100, True), Admission(1, 0, 300, True)]


def test_a_candidate_fits_to_the_last_token() -> None:
    assert plan_prefill([Candidate(500, 0, 0, 499)], budget()) == [Admission(0, 0, 500, True)]
    assert plan_prefill([Candidate(500, 0, 0, 500)], budget()) == []


@given(st.data(), st.sampled_from([1, 4, 16]), st.integers(4, 40), st.integers(10, 700))
def test_what_fits_an_empty_pool_fits_it_after_any_retraction(data: Any, page: int, pages: int, context: int) -> None:
    """Else it would wait for ever: the longest request that is let in, sent back with any number of tokens, any part cached."""
    total = pages * page
    length = data.draw(st.integers(2, max(2, max_req_len(context, total, page))))
    num_tokens = data.draw(st.integers(1, length - 1))
    cached = data.draw(st.integers(0, (num_tokens - 1) // page)) * page
    empty = budget(free_tokens=total, page_size=page)
    if length <= max_req_len(context, total, page):
        assert plan_prefill([Candidate(num_tokens, cached, cached, length - num_tokens)], empty)


def test_what_a_match_pins_is_spent() -> None:
    """600 of the prompt are cached, but 600 of the free tokens are just these."""
    assert plan_prefill([Candidate(700, 600, 600, 299)], budget()) == [Admission(0, 600, 100, True)]
    assert plan_prefill([Candidate(700, 600, 600, 300)], budget()) == []
    assert plan_prefill([Candidate(700, 600, 0, 300)], budget()) == [Admission(0, 600, 100, True)]


def test_running_requests_are_reserved_for() -> None:
    assert plan_prefill([Candidate(100, 0, 0, 100)], budget(reserved_tokens=799.5)) == []
    assert plan_prefill([Candidate(100, 0, 0, 100)], budget(reserved_tokens=799.0)) != []


def test_only_the_last_is_cut_and_pages_stay_whole() -> None:
    queue = [Candidate(20, 0, 0, 5), Candidate(100, 16, 0, 5), Candidate(10, 0, 0, 5)]
    plan = plan_prefill(queue, budget(chunk_tokens=64, page_size=16))
    assert plan == [Admission(0, 0, 20, True), Admission(1, 16, 32, False)]


def test_a_continuing_prompt_goes_first_and_takes_no_row() -> None:
    queue = [Candidate(100, 64, 0, 5, continuing=True), Candidate(10, 0, 0, 5)]
    plan = plan_prefill(queue, budget(chunk_tokens=64, rows=1))
    assert plan == [Admission(0, 64, 36, True), Admission(1, 0, 10, True)]
    assert plan_prefill(queue, budget(chunk_tokens=64, rows=0)) == [Admission(0, 64, 36, True)]


def test_a_continuing_prompt_takes_what_memory_is_left() -> None:
    queue = [Candidate(100, 64, 0, 5, continuing=True)]
    assert plan_prefill(queue, budget(free_tokens=32, page_size=16)) == [Admission(0, 64, 32, False)]
    assert plan_prefill(queue, budget(free_tokens=0, page_size=16)) == []


def test_the_first_prompt_may_exceed_the_input_budget() -> None:
    queue = [Candidate(300, 0, 0, 1), Candidate(10, 0, 0, 1)]
    assert plan_prefill(queue, budget(input_tokens=200)) == [Admission(0, 0, 300, True)]
    assert len(plan_prefill(queue[::-1], budget(input_tokens=200))) == 1


def test_looks_no_further_into_the_queue_than_needed() -> None:
    looked = []

    def queue() -> Any:
        for i in range(100):
            looked.append(i)
            yield Candidate(400, 0, 0, 50)

    assert len(plan_prefill(queue(), budget())) == 2
    assert looked == [0, 1, 2]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 12), st.integers(0, 60)), max_size=12),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 40),
    st.sampled_from([None, 16, 64]),
)
def test_a_plan_never_exceeds_its_budget(raw: Any, page: int, pages: int, chunk: int | None) -> None:
    queue = [Candidate(n, min(p * page, (n - 1) // page * page), 0, m) for n, p, m in raw]
    free = pages * page
    plan = plan_prefill(queue, budget(free_tokens=free, chunk_tokens=chunk, page_size=page))
    assert sum(-(-a.extend_len // page) * page for a in plan) <= free
    assert chunk is None or sum(-(-a.extend_len // page) * page for a in plan) <= chunk
    assert [a.queue_index for a in plan] == list(range(len(plan)))
    assert all(a.final for a in plan[:-1])
    assert all(a.extend_len > 0 for a in plan)
    assert all(a.final == (a.prefix_len + a.extend_len == queue[a.queue_index].num_tokens) for a in plan)


def test_new_token_ratio_numbers() -> None:
    ratio = NewTokenRatio.create()
    assert (ratio.init, ratio.floor) == (0.7, pytest.approx(0.098))
    for _ in range(700):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)
    ratio.retracted(np.array([3, 5]), np.array([50, 100]))
    assert ratio.value == pytest.approx(48 / 151)
    ratio.retracted(np.array([0, 0]), np.array([1000, 1000]))
    assert ratio.value == pytest.approx(0.098), "never below the floor, or decay would lift it"
    ratio.retracted(np.array([900]), np.array([10]))
    assert ratio.value == 1.0
    ratio.reset()
    assert ratio.value == 0.7
    assert NewTokenRatio.create(2.0).init == 1.0


def test_ratio_recovers_after_a_retraction() -> None:
    """Throughput must not stay low: the reservation sinks back to the floor within the decay steps."""
    ratio = NewTokenRatio.create()
    ratio.retracted(np.array([500]), np.array([520]))
    assert ratio.value > 0.9
    for _ in range(1000):
        ratio.decay()
    assert ratio.value == ratio.floor


def test_retraction_order() -> None:
    """Least output first, then the longest prompt, then the newest."""
    outputs = np.array([5, 1, 1, 9, 1])
    prompts = np.array([10, 20, 30, 5, 30])
    assert retraction_order(outputs, prompts).tolist() == [4, 2, 1, 0, 3]
