"""Attention over a slot pool: FlashAttention's online softmax (Dao: FlashAttention-2, 2023) with keys found through req_to_token,
and split-KV for decode (Flash-Decoding), whose parts are merged by log-sum-exp.

One kernel serves both. A program holds BLOCK_M rows of one request and one KV head, where a row is a pair of token and query head:
row m is head kv * G + m % G of token m // G. So a KV head is read once for all heads of its group, and a decode step of one token
fills the rows of a matrix product. How the keys of a request are split follows from its own length alone: a row's result does not
depend on its batch.

Legend: T tokens, B requests, H query heads, K KV heads, G = H / K, D head dim, S splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_splits", "window"])
def attend_kernel(
    Q,  # [T, H, D]
    K,  # [slots, K, D]
    V,  # [slots, K, D]
    Out,  # [T, H, D], written where SPLIT is false
    Part,  # float32 [T, H, S, D], written where SPLIT is true
    Lse,  # float32 [T, H, S], base 2
    Table,  # int32 [rows, width]
    Rows,  # int64 [B]
    SeqLens,  # int64 [B]
    ExtendLens,  # int64 [B]
    Starts,  # int64 [B], index of each request's first token
    scale,  # float32
    cap,  # float32, where CAP
    window,  # int32, where WINDOW
    num_splits,  # S
    q_token,
    q_head,
    kv_slot,
    kv_head,
    out_token,
    out_head,
    table_row,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLIT: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid: (blocks of rows, K, B * S)."""
    block = tl.program_id(0)
    head_kv = tl.program_id(1)
    request = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    extend = tl.load(ExtendLens + request).to(tl.int32)
    if block * BLOCK_M >= extend * GROUP:
        return
    seq = tl.load(SeqLens + request).to(tl.int32)
    start = tl.load(Starts + request)
    cells = Table + tl.load(Rows + request) * table_row
    prefix = seq - extend

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = head_kv * GROUP + m % GROUP
    real = m < extend * GROUP
    position = prefix + token
    d = tl.arange(0, BLOCK_D)
    q_at = (start + token)[:, None] * q_token + head[:, None] * q_head + d[None, :]
    q = tl.load(Q + q_at, mask=real[:, None] & (d[None, :] < D), other=0.0)

    # keys of this block of rows, cut to the split's part of the request's keys
    first = block * BLOCK_M // GROUP
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, extend - 1)
    low = prefix * 0
    if WINDOW:
        low = tl.maximum(prefix + first - window + 1, 0)
    high = prefix + last + 1
    if SPLIT:
        base = prefix * 0
        if WINDOW:
            base = tl.maximum(prefix - window + 1, 0)
        length = tl.maximum(tl.cdiv(seq - base, MAX_SPLITS), MIN_SPLIT)
        length = tl.cdiv(length, BLOCK_N) * BLOCK_N
        low = tl.maximum(low, base + split * length)
        high = tl.minimum(high, base + (split + 1) * length)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in range(low, high, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        there = key < high
        slot = tl.load(cells + key, mask=there, other=0).to(tl.int64)
        kv_at = slot[:, None] * kv_slot + head_kv * kv_head + d[None, :]
        inside = there[:, None] & (d[None, :] < D)
        k = tl.load(K + kv_at, mask=inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAP:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # cap * tanh(scores / cap)
        scores = scores * LOG2E
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(V + kv_at, mask=inside, other=0.0).to(q.dtype)
        acc = acc * fade[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        best = higher

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLIT:
        part = ((start + token) * HEADS + head) * num_splits + split
        lse = tl.where(total > 0.0, best + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(Lse + part, lse, mask=real)
        some = real & (total > 0.0)
        tl.store(Part + part[:, None] * D + d[None, :], acc, mask=some[:, None] & (d[None, :] < D))
    else:
        out_at = (start + token)[:, None] * out_token + head[:, None] * out_head + d[None, :]
        tl.store(Out + out_at, acc.to(Out.dtype.element_ty), mask=real[:, None] & (d[None, :] < D))


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    Part,  # float32 [T, H, S, D]
    Lse,  # float32 [T, H, S]
    Out,  # [T, H, D]
    num_splits,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The weighted mean of the splits of one token and head. A split that saw no key has lse -inf and is not read. Grid: (T, H)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    base = (token * HEADS + head) * num_splits
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in range(num_splits):
        lse = tl.load(Lse + base + split + tl.zeros([1], tl.int32))
        higher = tl.maximum(best, lse)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(best - shift)
        weight = tl.exp2(lse - shift)
        part = tl.load(Part + (base + split) * D + d, mask=(d < D) & (lse > float("-inf")), other=0.0)
        acc = acc * fade + part * weight
        total = total * fade + weight
        best = higher
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(Out + token * out_token + head * out_head + d, acc.to(Out.dtype.element_ty), mask=d < D)


@triton.jit
def store_kv_kernel(
    KNew,  # [T, K, D]
    VNew,
    K,  # [slots, K, D]
    V,
    Slots,  # int64 [T]
    k_token,
    k_head,
    v_token,
    v_head,
    kv_slot,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write K and V of one token to its slot, in the pool's dtype. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(Slots + token)
    at = tl.arange(0, BLOCK)
    head, d = at // D, at % D
    inside = at < HEADS * D
    k = tl.load(KNew + token * k_token + head * k_head + d, mask=inside)
    v = tl.load(VNew + token * v_token + head * v_head + d, mask=inside)
    tl.store(K + slot * kv_slot + at, k.to(K.dtype.element_ty), mask=inside)
    tl.store(V + slot * kv_slot + at, v.to(V.dtype.element_ty), mask=inside)
