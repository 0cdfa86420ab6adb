"""Small operations of a layer, each read once and written once: RMSNorm with or without a sum before it, rotary, gated activations.

Everything is computed in float32 and rounded where torch's composition of operations rounds what a model's numerics depend on.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    X,  # [T, H, D]
    Delta,  # [T, D], where ADD
    Weight,  # [D]
    Out,  # [T, H, D], contiguous
    Sum,  # [T, D], contiguous, where ADD
    eps,
    x_token,
    x_head,
    delta_token,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    GEMMA: tl.constexpr,
):
    """One row. ADD: x + delta, rounded, is normed and kept. GEMMA: times 1 + w, else rounded before times w. Grid: (T * H,)."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    d = tl.arange(0, BLOCK)
    inside = d < D
    dtype = Out.dtype.element_ty
    x = tl.load(X + token * x_token + head * x_head + d, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = x + tl.load(Delta + token * delta_token + d, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(Sum + token * D + d, rounded, mask=inside)
        x = rounded.to(tl.float32)
    w = tl.load(Weight + d, mask=inside, other=0.0).to(tl.float32)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps))
    if GEMMA:
        x = x * (1.0 + w)
    else:
        x = x.to(dtype).to(tl.float32) * w
    tl.store(Out + row * D + d, x.to(dtype), mask=inside)


@triton.jit
def rotate_kernel(
    X,  # [T, H, 2 R]
    Cos,  # [T, R], contiguous
    Sin,
    Out,  # [T, H, 2 R], contiguous
    x_token,
    x_head,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """All heads of one token; dim i of the first half pairs with dim i of the second. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    in_r = r < R
    cos = tl.load(Cos + token * R + r, mask=in_r, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(Sin + token * R + r, mask=in_r, other=0.0).to(tl.float32)[None, :]
    for first_head in range(0, HEADS, BLOCK_H):
        head = first_head + tl.arange(0, BLOCK_H)
        inside = (head < HEADS)[:, None] & in_r[None, :]
        x_at = X + token * x_token + head[:, None] * x_head + r[None, :]
        out_at = Out + (token * HEADS + head[:, None]) * (2 * R) + r[None, :]
        first = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_at + R, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_at, (first * cos - second * sin).to(Out.dtype.element_ty), mask=inside)
        tl.store(out_at + R, (second * cos + first * sin).to(Out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(X, Out, x_token, inner, BLOCK: tl.constexpr, SILU: tl.constexpr):
    """act(x[:inner]) * x[inner:] of one token, act (SiLU, or GELU by tanh) rounded before. Grid: (T, blocks of inner)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(X + token * x_token + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + token * x_token + inner + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        act = gate * tl.sigmoid(gate)
    else:
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))  # 2 sqrt(2 / pi); tanh by sigmoid
    dtype = Out.dtype.element_ty
    tl.store(Out + token * inner + at, (act.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)
