from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.mem_cache.allocator import SlotAllocator


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def take(allocator: SlotAllocator, num_tokens: int) -> np.ndarray:
    slots = allocator.alloc_extend(ints(0), ints(num_tokens), ints(0))
    assert slots is not None
    return slots


@pytest.mark.parametrize("page", [1, 4, 16, 64])
def test_scratch_page_is_never_handed_out_and_all_others_are(page: int) -> None:
    allocator = SlotAllocator(4 * page, page)
    assert allocator.available == 4 * page
    slots = take(allocator, 4 * page)
    assert slots.dtype == np.int32
    assert slots.tolist() == list(range(page, 5 * page))
    assert allocator.available == 0


def test_alloc_extend_fills_the_last_page_then_whole_pages_then_a_head() -> None:
    allocator = SlotAllocator(40, 4)
    first = take(allocator, 6)
    assert first.tolist() == [4, 5, 6, 7, 8, 9]
    prefix, seq = ints(6, 0, 4, 8), ints(13, 3, 4, 9)
    assert allocator.extend_cost(prefix, seq) == 16
    slots = allocator.alloc_extend(prefix, seq, ints(9, -1, 7, 11))
    assert slots is not None
    assert slots.tolist() == [10, 11, 12, 13, 14, 15, 16, 20, 21, 22, 24]
    assert allocator.available == 40 - 8 - 16


def test_alloc_decode_opens_a_page_only_at_its_start() -> None:
    allocator = SlotAllocator(40, 4)
    take(allocator, 8)
    assert allocator.decode_cost(ints(5, 6, 8, 9)) == 8
    slots = allocator.alloc_decode(ints(5, 6, 8, 9), ints(7, 8, 10, 11))
    assert slots is not None
    assert slots.tolist() == [12, 9, 11, 16]
    assert slots.dtype == np.int32


@pytest.mark.parametrize("page", [1, 4])
def test_short_means_none_and_nothing_taken(page: int) -> None:
    allocator = SlotAllocator(2 * page, page)
    assert allocator.alloc_extend(ints(0, 0), ints(page, page + 1), ints(0, 0)) is None
    assert allocator.alloc_decode(ints(1, 1, 1), ints(0, 0, 0)) is None
    assert allocator.available == 2 * page
    assert len(take(allocator, 2 * page)) == 2 * page
    assert allocator.alloc_decode(ints(1), ints(0)) is None


def test_empty_batches_cost_nothing() -> None:
    for page in (1, 4):
        allocator = SlotAllocator(8, page)
        for slots in (allocator.alloc_extend(ints(), ints(), ints()), allocator.alloc_decode(ints(), ints())):
            assert slots is not None
            assert (len(slots), slots.dtype) == (0, np.int32)
        assert allocator.extend_cost(ints(), ints()) == allocator.decode_cost(ints()) == 0
        allocator.free(ints())
        assert allocator.available == 8


def test_a_sequence_shorter_than_its_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        SlotAllocator(8, 1).alloc_extend(ints(3), ints(2), ints(4))


@pytest.mark.parametrize(("num_slots", "page"), [(0, 1), (10, 4), (8, 0), (-4, 4)])
def test_sizes_that_are_no_whole_pages_are_refused(num_slots: int, page: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        SlotAllocator(num_slots, page)


def test_freed_slots_come_back_in_ascending_runs() -> None:
    allocator = SlotAllocator(8, 1)
    slots = take(allocator, 8)
    allocator.free(slots[[5, 2, 7]])
    allocator.free(slots[[4, 3]])
    assert take(allocator, 5).tolist() == [3, 4, 5, 6, 8]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([4, 5, 6, 7, 4, 5], "start at a page"),
        ([4, 5, 8, 4], "twice"),
        ([5, 6, 7], "start at a page"),
        ([4, 5, 9], "start at a page"),
        ([4, 4], "start at a page"),
        ([0, 1], "outside"),
        ([20, 21], "outside"),
        ([-4, -3], "outside"),
        ([12], "already free"),
        ([4, 5, 6, 7, 12], "already free"),
    ],
)
def test_a_wrong_free_raises_and_frees_nothing(slots: list[int], message: str) -> None:
    allocator = SlotAllocator(16, 4)
    take(allocator, 8)
    with pytest.raises(RuntimeError, match=message):
        allocator.free(ints(*slots))
    assert allocator.available == 8
    allocator.free(ints(4, 5, 6, 7, 8))
    assert allocator.available == 16


@pytest.mark.parametrize("slots", [[3, 3], [0], [9], [-1], [7]])
def test_a_wrong_free_raises_at_page_size_one(slots: list[int]) -> None:
    allocator = SlotAllocator(8, 1)
    take(allocator, 6)
    with pytest.raises(RuntimeError, match="free"):
        allocator.free(ints(*slots))
    assert allocator.available == 2


def test_head_of_a_page_frees_the_whole_page() -> None:
    allocator = SlotAllocator(16, 4)
    take(allocator, 16)
    allocator.free(ints(8, 9, 10, 11, 4, 5, 16))
    assert allocator.available == 12
    assert allocator.is_free(ints(4, 7, 8, 12, 19)).tolist() == [True, True, True, False, True]


def test_a_free_group_takes_effect_at_its_outermost_end() -> None:
    allocator = SlotAllocator(8, 1)
    slots = take(allocator, 8)
    with allocator.free_group():
        allocator.free(slots[:3])
        with allocator.free_group():
            allocator.free(slots[3:5])
        assert allocator.available == 0
        slots[:] = 99
    assert allocator.available == 5
    assert take(allocator, 5).tolist() == [1, 2, 3, 4, 5]


def test_a_free_group_frees_when_an_exception_leaves_it() -> None:
    allocator = SlotAllocator(4, 1)
    slots = take(allocator, 4)
    with pytest.raises(KeyError), allocator.free_group():
        allocator.free(slots[:2])
        raise KeyError
    assert allocator.available == 2


def test_a_double_free_inside_a_group_raises_at_its_end() -> None:
    allocator = SlotAllocator(4, 1)
    slots = take(allocator, 4)
    with pytest.raises(RuntimeError, match="twice"), allocator.free_group():
        allocator.free(slots[:2])
        allocator.free(slots[1:3])
    assert allocator.available == 0


@pytest.mark.parametrize("page", [1, 4])
def test_callers_arrays_are_neither_kept_nor_shared(page: int) -> None:
    allocator = SlotAllocator(8 * page, page)
    slots = take(allocator, 8 * page)
    assert slots.base is None
    mine = slots.copy()
    allocator.free(mine)
    mine[:] = -7
    again = take(allocator, 8 * page)
    assert again.tolist() == slots.tolist()


@settings(max_examples=60, deadline=None)
@given(
    page=st.sampled_from([1, 4, 16]),
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8),
)
def test_extend_equals_token_by_token_decode(page: int, lens: list[tuple[int, int]]) -> None:
    """Each request's row is page aligned, whatever the split, and pages belong to one request only."""
    allocator = SlotAllocator(10 * 80 * page, page)
    rows = [take(allocator, prefix).tolist() for prefix, _ in lens]
    prefix_lens = np.array([prefix for prefix, _ in lens])
    seq_lens = prefix_lens + np.array([extend for _, extend in lens])
    cost, before = allocator.extend_cost(prefix_lens, seq_lens), allocator.available
    slots = allocator.alloc_extend(prefix_lens, seq_lens, np.array([row[-1] if row else 0 for row in rows]))
    assert slots is not None
    assert before - allocator.available == cost
    for row, part in zip(rows, np.split(slots, np.cumsum(seq_lens - prefix_lens)[:-1]), strict=True):
        row += part.tolist()
    for row in rows:
        assert [slot % page for slot in row] == [i % page for i in range(len(row))]
        assert all(row[i] == row[i - 1] + 1 for i in range(len(row)) if i % page)
    everything = [slot for row in rows for slot in row]
    assert len(set(everything)) == len(everything)
    pages = [{slot // page for slot in row} for row in rows]
    assert sum(map(len, pages)) == len(set().union(*pages))
    for row in rows:
        allocator.free(np.array(row, np.int32))
    assert allocator.available == allocator.num_slots


def test_ragged_batch_never_runs_short_while_its_cost_is_free() -> None:
    """148 ragged sequences at page 16 in a pool of exactly their pages: the cost told beforehand is the cost."""
    rng = np.random.default_rng(0)
    prompt_lens = rng.integers(1, 60, size=148)
    need = int((-(-(prompt_lens + 8) // 16) * 16).sum())
    allocator = SlotAllocator(need, 16)
    slots = allocator.alloc_extend(np.zeros(148, np.int32), prompt_lens, np.zeros(148, np.int32))
    assert slots is not None
    last = slots[np.cumsum(prompt_lens) - 1]
    for step in range(1, 9):
        cost, before = allocator.decode_cost(prompt_lens + step), allocator.available
        assert cost <= before
        new = allocator.alloc_decode(prompt_lens + step, last)
        assert new is not None
        assert before - allocator.available == cost
        last = new
    assert allocator.available == 0
