from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.mem_cache import sizing


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert sizing.kv_bytes_per_token(num_layers=30, num_kv_heads=3, head_dim=64, elem_size=4) == 30 * 3 * 128 * 4
    assert sizing.kv_bytes_per_token(num_layers=2, num_kv_heads=1, head_dim=192, v_head_dim=128, elem_size=2) == 2 * 320 * 2


@pytest.mark.parametrize(
    ("num_bytes", "page", "tokens"), [(1000, 1, 99), (1009, 1, 99), (1000, 16, 80), (160, 16, 0), (0, 4, 0), (9, 1, 0)]
)
def test_tokens_in_leaves_room_for_the_scratch_page(num_bytes: int, page: int, tokens: int) -> None:
    assert sizing.tokens_in(num_bytes, 10, page) == tokens
    assert tokens == 0 or (tokens + page) * 10 <= num_bytes


def test_kv_budget_is_what_the_fraction_leaves_after_the_weights() -> None:
    assert sizing.kv_budget(free_after_load=700, free_before_load=1000, mem_fraction=0.75) == 450
    assert sizing.kv_budget(free_after_load=100, free_before_load=1000, mem_fraction=0.75) == 0


@pytest.mark.parametrize(
    ("gib", "tp", "tier"),
    [
        (None, 1, (4096, 160)),
        (16, 8, (2048, 8)),
        (24, 1, (2048, 24)),
        (24, 4, (2048, 80)),
        (40, 1, (4096, 32)),
        (48, 8, (4096, 160)),
        (80, 1, (8192, 256)),
        (141, 4, (8192, 512)),
        (180, 1, (16384, 512)),
    ],
)
def test_gpu_tiers(gib: float | None, tp: int, tier: tuple[int, int]) -> None:
    assert sizing.gpu_tier(gib, tp) == tier


def test_default_mem_fraction() -> None:
    mib = 24 * 1024
    reserved = 512 + 1.5 * 2048 + 128 + 2 * 24
    assert sizing.default_mem_fraction(mib, chunked_prefill_size=2048, max_decode_batch=24) == round((mib - reserved) / mib, 3)
    assert sizing.default_mem_fraction(mib, chunked_prefill_size=64, max_decode_batch=24) == round((mib - reserved) / mib, 3)
    big = 141 * 1024
    assert sizing.default_mem_fraction(big, chunked_prefill_size=2048) == round((big - 10240) / big, 3)
    unchunked = 512 + 1.5 * 16384 + 128
    assert sizing.default_mem_fraction(big, chunked_prefill_size=None) == round((big - unchunked) / big, 3)
    assert sizing.default_mem_fraction(None, chunked_prefill_size=8192) == 0.88
    assert sizing.default_mem_fraction(1024, chunked_prefill_size=8192) == 0.0


@pytest.mark.parametrize(
    ("total", "context", "cpu", "limit"),
    [
        (1_000_000, 8192, False, 4096),
        (10_000, 8192, False, 2048),
        (50_000, 8192, False, 3125),
        (50_000, 8192, True, 256),
        (100, 8192, True, 50),
        (1, 8192, True, 1),
    ],
)
def test_max_running_requests(total: int, context: int, cpu: bool, limit: int) -> None:
    assert sizing.max_running_requests(total, context, cpu=cpu) == limit


def test_max_running_requests_of_the_user_is_bound_by_the_pool_only() -> None:
    assert sizing.max_running_requests(100_000, 8192, user_limit=1000, cpu=True) == 1000
    assert sizing.max_running_requests(100, 8192, user_limit=1000) == 50


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 300), st.integers(4, 40), st.sampled_from([1, 4, 16]))
def test_a_longest_request_fits_the_pool(context: int, pages: int, page: int) -> None:
    """In whole pages and with a page to spare, which is what admission asks for."""
    total = pages * page
    longest = sizing.max_req_len(context, total, page)
    assert longest <= context
    assert sizing.ceil_page(longest, page) + page <= total
    assert longest == context or sizing.ceil_page(longest + 2, page) + page > total
    prompt = sizing.max_prompt_len(context, total, page)
    assert prompt < longest or prompt == 0


def test_max_req_len() -> None:
    assert sizing.max_req_len(8192, 256, 16) == 239
    assert sizing.max_req_len(100, 256, 16) == 100
    assert sizing.max_req_len(100, 16, 16) == 0
