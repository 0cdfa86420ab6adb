from __future__ import annotations

import pytest
import torch

from banyan.mem_cache.kv_pool import KVPool


def make(num_slots: int = 8, page_size: int = 4) -> KVPool:
    return KVPool(
        num_slots=num_slots,
        page_size=page_size,
        num_layers=2,
        num_kv_heads=3,
        head_dim=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_written_slots_are_read_back_and_nothing_else_changes():
    pool = make()
    for layer in range(2):
        pool.k(layer).fill_(7), pool.v(layer).fill_(8)
    qkv = torch.randn(3, 9, 5)
    k, v, before = qkv[:, 3:6], qkv[:, 6:], qkv.clone()  # strided views, as a merged projection gives them
    slots = torch.tensor([11, 4, 9])
    pool.write(1, slots, k, v)
    assert torch.equal(qkv, before)
    assert torch.equal(pool.gather(1, slots)[0], k) and torch.equal(pool.gather(1, slots)[1], v)
    others = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 10])
    assert (pool.k(1)[others] == 7).all() and (pool.v(1)[others] == 8).all()
    assert (pool.k(0) == 7).all() and (pool.v(0) == 8).all()


def test_it_holds_a_scratch_page_of_zeros_beside_the_slots():
    pool = make()
    assert pool.k(0).shape == pool.v(1).shape == (12, 3, 5)
    assert all((t[:4] == 0).all() for layer in range(2) for t in (pool.k(layer), pool.v(layer)))


@pytest.mark.parametrize("num_slots", [0, 3, 6])
def test_slots_come_in_whole_pages(num_slots):
    with pytest.raises(ValueError, match="page size 4"):
        make(num_slots=num_slots)


def test_a_slot_outside_the_pool_is_an_error():
    with pytest.raises(IndexError):
        make().write(0, torch.tensor([12]), torch.zeros(1, 3, 5), torch.zeros(1, 3, 5))


def test_int8_holds_each_head_to_half_a_step_of_its_own_scale():
    pool = KVPool(num_slots=8, page_size=1, num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.int8, device=torch.device("cpu"))
    assert pool.compute_dtype is torch.float32 and not pool.exact
    slots = torch.tensor([5, 2])
    k, v = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1)), torch.zeros(2, 2, 16)
    k[0, 1] *= 1000
    pool.write(0, slots, k, v)
    got_k, got_v = pool.gather(0, slots)
    assert ((got_k - k).abs() <= k.abs().amax(-1, keepdim=True) / 253).all()
    assert torch.equal(got_v, v)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_rounds_to_nearest_and_saturates(dtype):
    most = torch.finfo(dtype).max
    pool = KVPool(
        num_slots=8,
        page_size=1,
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        dtype=dtype,
        device=torch.device("cpu"),
        compute_dtype=torch.bfloat16,
    )
    k = torch.tensor([[[0.3, -1.0, 1e6, -1e6]]], dtype=torch.bfloat16)
    pool.write(0, torch.tensor([5]), k, -k)
    got, negated = pool.gather(0, torch.tensor([5]))
    assert got.dtype is torch.bfloat16 and torch.equal(got, -negated)
    assert got.flatten().tolist() == [float(k[0, 0, 0].to(dtype)), -1.0, most, -most]
    assert not pool.exact
