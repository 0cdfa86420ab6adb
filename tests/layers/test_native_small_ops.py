"""Norms, rotary, activations and embedding of the native library against torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from banyan.layers.attention.base import AttentionSpec
from banyan.layers.kernels.cpu.attention import StepStruct, kv_struct
from banyan.layers.kernels.cpu.build import supported_levels
from banyan.layers.kernels.cpu.library import load
from banyan.layers.kernels.ops import rotate
from banyan.mem_cache.kv_pool import KVPool

NATIVE = load(supported_levels()[-1])
LIB = NATIVE.lib
CLOSE = {"atol": 2e-6, "rtol": 2e-6}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [4, 7, 48, 576])
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_norms(tokens: int, dim: int) -> None:
    x, weight, delta = noise(tokens, dim), noise(dim, seed=1), noise(tokens, dim, seed=2)
    out, total = torch.empty(tokens, dim), x.clone()
    LIB.bny_norm(x.data_ptr(), dim, weight.data_ptr(), 1e-5, out.data_ptr(), dim, tokens, dim)
    torch.testing.assert_close(out, F.rms_norm(x, (dim,), weight, 1e-5), **CLOSE)
    LIB.bny_add_norm(delta.data_ptr(), dim, total.data_ptr(), dim, weight.data_ptr(), 1e-5, out.data_ptr(), dim, tokens, dim)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(out, F.rms_norm(x + delta, (dim,), weight, 1e-5), **CLOSE)


ACTS = {
    0: F.silu,
    1: lambda x: F.gelu(x, approximate="tanh"),
    2: F.gelu,
}


@pytest.mark.parametrize("inner", [3, 56, 1536])
@pytest.mark.parametrize("act", ACTS)
def test_activations(act: int, inner: int) -> None:
    x = noise(9, 2 * inner) * 5
    x[0, 0], x[1, 0], x[2, 0] = 100.0, -100.0, 0.0
    out = torch.empty(9, inner)
    LIB.bny_act_mul(act, x.data_ptr(), 2 * inner, out.data_ptr(), inner, 9, inner)
    torch.testing.assert_close(out, ACTS[act](x[:, :inner]) * x[:, inner:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(dtype: torch.dtype) -> None:
    table, ids = noise(50, 12).to(dtype), torch.tensor([3, 49, 0, 3])
    out = torch.empty(4, 12)
    LIB.bny_embed(table.data_ptr(), int(dtype is torch.bfloat16), ids.data_ptr(), 4, 12, 1.5, out.data_ptr(), 12)
    assert torch.equal(out, table[ids].float() * 1.5)


@pytest.mark.parametrize("dim", [8, 12, 64])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotation_and_write(dim: int, with_norm: bool) -> None:
    tokens, heads, kv_heads = 5, 4, 2
    cpu = torch.device("cpu")
    pool = KVPool(num_slots=20, page_size=1, num_layers=1, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.float32, device=cpu)
    kv = kv_struct(pool, AttentionSpec(0, heads, kv_heads, dim, 1.0))
    slots, positions = torch.tensor([7, 3, 20, 1, 9]), torch.tensor([0, 4, 2, 2, 30])
    step = StepStruct(slots=slots.data_ptr(), num_tokens=tokens)
    qkv = noise(tokens, heads + 2 * kv_heads, dim)
    angles = noise(31, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = noise(dim, seed=3), noise(dim, seed=4)
    tables = cos[positions][:, None], sin[positions][:, None]
    q, k, v = qkv.clone().split([heads, kv_heads, kv_heads], dim=1)
    if with_norm:
        q, k = F.rms_norm(q, (dim,), q_norm, 1e-6), F.rms_norm(k, (dim,), k_norm, 1e-6)
    LIB.bny_rope_write(
        ctypes.byref(kv),
        ctypes.byref(step),
        qkv.data_ptr(),
        qkv.stride(0),
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        q_norm.data_ptr() if with_norm else None,
        k_norm.data_ptr() if with_norm else None,
        1e-6,
    )
    torch.testing.assert_close(qkv[:, :heads], rotate(q, tables), **CLOSE)
    torch.testing.assert_close(pool.k(0)[slots], rotate(k, tables), **CLOSE)
    assert torch.equal(pool.v(0)[slots], v)
