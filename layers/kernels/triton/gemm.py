"""Products of activations with quantised weights.

Legend: M tokens, N output features, K input features, Z values that share a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY: tl.constexpr = tl.constexpr(1e-30)  # a scale below it is one of a row of zeros
ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: to add and subtract it rounds to an integer, ties to even


@triton.jit
def quantize_kernel(
    X,  # [T, K]
    Out,  # int8 or float8 [T, K], contiguous
    Scale,  # float32 [T]
    K,
    x_row,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row and the scale that maps its greatest value to LIMIT. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    x = tl.load(X + row * x_row + k, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), 0), LIMIT)
    inverse = tl.where(scale > TINY, tl.div_rn(1.0, tl.where(scale > TINY, scale, 1.0)), 0.0)
    x = tl.minimum(tl.maximum(x * inverse, -LIMIT), LIMIT)
    if INTEGER:
        x = (x + ROUND) - ROUND
    tl.store(Out + row * K + k, x.to(Out.dtype.element_ty), mask=inside)
    tl.store(Scale + row, scale)


@triton.jit
def scaled_mm_kernel(
    A,  # int8 or float8 [M, K]
    B,  # int8 or float8 [K, N], K contiguous
    ScaleA,  # float32 [M]
    ScaleB,  # float32 [N]
    Bias,  # [N], where BIAS
    Out,  # [M, N]
    M,
    N,
    K,
    a_row,
    b_col,
    out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTEGER: tl.constexpr,
    BIAS: tl.constexpr,
):
    """(A B) * scale_a * scale_b + bias. Grid: (blocks of M, blocks of N)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = m < M, n < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGER else tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(A + m[:, None].to(tl.int64) * a_row + k[None, :], mask=in_m[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(B + n[None, :].to(tl.int64) * b_col + k[:, None], mask=in_n[None, :] & (k < K)[:, None], other=0.0)
        if INTEGER:
            acc += tl.dot(a, b, out_dtype=tl.int32)
        else:
            acc = tl.dot(a, b, acc)
    scale_a = tl.load(ScaleA + m, mask=in_m, other=0.0)
    scale_b = tl.load(ScaleB + n, mask=in_n, other=0.0)
    out = acc.to(tl.float32) * scale_a[:, None] * scale_b[None, :]
    if BIAS:
        out += tl.load(Bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = Out + m[:, None].to(tl.int64) * out_row + n[None, :]
    tl.store(at, out.to(Out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def int4_mm_kernel(
    X,  # [M, K]
    Packed,  # uint8 [N, K / 2]; byte j of a group of Z holds value j in its low half and value j + Z / 2 in its high half
    Scales,  # [N, K / Z]
    Minimums,  # [N, K / Z]
    Bias,
    Out,  # [M, N]
    M,
    N,
    K,
    x_row,
    out_row,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
):
    """x W^T + bias with W = nibble * scale + minimum. Grid: (blocks of M, blocks of N)."""
    HALF: tl.constexpr = GROUP // 2
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = m < M, n < N
    j = tl.arange(0, HALF)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(K // GROUP):
        x_at = X + m[:, None].to(tl.int64) * x_row + group * GROUP + j[None, :]
        low_x = tl.load(x_at, mask=in_m[:, None], other=0.0)
        high_x = tl.load(x_at + HALF, mask=in_m[:, None], other=0.0)
        packed = tl.load(Packed + n[None, :].to(tl.int64) * (K // 2) + group * HALF + j[:, None], mask=in_n[None, :], other=0)
        low = (packed & 15).to(tl.int32).to(low_x.dtype)
        high = (packed >> 4).to(tl.int32).to(low_x.dtype)
        part = tl.dot(low_x, low, input_precision="ieee")
        part = tl.dot(high_x, high, part, input_precision="ieee")
        at = n.to(tl.int64) * (K // GROUP) + group
        scale = tl.load(Scales + at, mask=in_n, other=0.0).to(tl.float32)
        minimum = tl.load(Minimums + at, mask=in_n, other=0.0).to(tl.float32)
        total = tl.sum(low_x.to(tl.float32), 1) + tl.sum(high_x.to(tl.float32), 1)
        acc += part * scale[None, :] + total[:, None] * minimum[None, :]
    if BIAS:
        acc += tl.load(Bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = Out + m[:, None].to(tl.int64) * out_row + n[None, :]
    tl.store(at, acc.to(Out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
