"""Sampling without sorting and without asking the host: one program per row searches the bits of a threshold.

A row's candidates in descending order are ordered by the bits of |z|, where z <= 0 is the logit less the greatest one, over the
temperature. How many candidates, or how much mass, lie before a threshold grows with it, so the threshold at which a count or a
mass is reached is found bit by bit, three bits in each pass over the row. Ties go by id. The meaning is that of layers/sampler.py.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

BITS: tl.constexpr = tl.constexpr(3)  # found in one pass
WEIGHTLESS: tl.constexpr = tl.constexpr(0x42D00000)  # bits of 104: e^-104 is 0 in float32


@triton.jit
def _load(logits, at, V, top, temperature):
    """(bits of |z|, weight e^z) of a block; beyond the vocabulary bits are the greatest and weights 0."""
    z = tl.load(logits + at, mask=at < V, other=float("-inf"))
    z = (z - top) / temperature
    return tl.where(at < V, tl.abs(z).to(tl.int32, bitcast=True), 0x7FFFFFFF), tl.exp(z)


@triton.jit
def _search(logits, V, top, temperature, target, COUNT: tl.constexpr, STRICT: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest threshold before which less than ``target`` (STRICT; else at most that) lies: candidates (COUNT) or mass."""
    steps = tl.arange(0, 8)
    found = tl.zeros([1], tl.int32)
    for digit in range(10, -1, -1):
        shift = digit * BITS
        ends = found + (steps << shift)
        usable = (ends >= found) & (steps < tl.where(digit == 10, 2, 8))  # 31 bits: the first digit has one
        before = tl.zeros([8], tl.float64)
        for start in range(0, V, BLOCK):
            bits, weight = _load(logits, start + tl.arange(0, BLOCK), V, top, temperature)
            value = tl.where(bits == 0x7FFFFFFF, 0.0, 1.0) if COUNT else weight
            before += tl.sum(tl.where(bits[:, None] < ends[None, :], value[:, None], 0.0), 0).to(tl.float64)
        within = (before < target) if STRICT else (before <= target)
        found += tl.sum((within & usable & (steps > 0)).to(tl.int32), 0) << shift
    return tl.sum(found, 0)


@triton.jit
def _before(logits, V, top, temperature, threshold, BLOCK: tl.constexpr):
    """(count, mass) before a threshold, and the mass of one candidate at it."""
    ends = tl.zeros([8], tl.int32) + threshold  # the sums are of the shape of _search's, hence rounded alike
    count = tl.zeros([8], tl.float64)
    mass = tl.zeros([8], tl.float64)
    one = tl.zeros([1], tl.float32)
    for start in range(0, V, BLOCK):
        bits, weight = _load(logits, start + tl.arange(0, BLOCK), V, top, temperature)
        inside = bits[:, None] < ends[None, :]
        count += tl.sum(inside.to(tl.float32), 0).to(tl.float64)
        mass += tl.sum(tl.where(inside, weight[:, None], 0.0), 0).to(tl.float64)
        one = tl.maximum(one, tl.max(tl.where(bits == threshold, weight, 0.0), 0))
    return tl.max(count, 0), tl.max(mass, 0), tl.max(one, 0).to(tl.float64)


@triton.jit
def sample_kernel(
    Logits,  # float32 [S, V]
    Best,  # int64 [S], the greedy choice
    Params,  # float64 [5, S]: temperature, top_p, min_p, top_k, uniform
    Out,  # int64 [S]
    S,
    V,
    logits_row,
    BLOCK: tl.constexpr,
):
    """Grid: (S,). A row whose temperature is 0, whose top_k is 1 or whose best is not finite takes its best."""
    row = tl.program_id(0).to(tl.int64)
    logits = Logits + row * logits_row
    best = tl.load(Best + row)
    temperature = tl.load(Params + row).to(tl.float32)
    top_p = tl.load(Params + S + row)
    min_p = tl.load(Params + 2 * S + row)
    top_k = tl.load(Params + 3 * S + row)
    uniform = tl.load(Params + 4 * S + row)
    top = tl.load(logits + best)
    if (temperature < 1e-6) | (top_k <= 1.0) | (tl.abs(top) == float("inf")) | (top != top):
        tl.store(Out + row, best)
        return

    kept, mass, one = _before(logits, V, top, temperature, WEIGHTLESS, BLOCK)
    if top_k < kept:
        at = _search(logits, V, top, temperature, top_k, True, True, BLOCK)
        below, mass_below, one = _before(logits, V, top, temperature, at, BLOCK)
        kept = top_k
        mass = mass_below + (top_k - below) * one
    if top_p < 1.0:
        target = top_p * mass
        at = _search(logits, V, top, temperature, target, False, True, BLOCK)
        below, mass_below, one = _before(logits, V, top, temperature, at, BLOCK)
        nucleus = below + tl.maximum(tl.ceil((target - mass_below) / tl.where(one > 0.0, one, 1.0)), 1.0)
        if nucleus < kept:
            kept = nucleus
            mass = mass_below + (nucleus - below) * one
    if min_p > 0.0:
        likely = tl.zeros([1], tl.float64)
        likely_mass = tl.zeros([1], tl.float64)
        for start in range(0, V, BLOCK):
            bits, weight = _load(logits, start + tl.arange(0, BLOCK), V, top, temperature)
            enough = (weight.to(tl.float64) >= min_p) & (bits < 0x7FFFFFFF)
            likely += tl.sum(enough.to(tl.float32), 0).to(tl.float64)
            likely_mass += tl.sum(tl.where(enough, weight, 0.0), 0).to(tl.float64)
        if tl.sum(likely, 0) < kept:
            kept = tl.sum(likely, 0)
            mass = tl.sum(likely_mass, 0)

    drawn = uniform * mass
    at = _search(logits, V, top, temperature, drawn, False, False, BLOCK)
    below, mass_below, one = _before(logits, V, top, temperature, at, BLOCK)
    choice = below + tl.floor(tl.maximum(drawn - mass_below, 0.0) / tl.where(one > 0.0, one, 1.0))
    choice = tl.maximum(tl.minimum(choice, kept - 1.0), 0.0)
    at = _search(logits, V, top, temperature, choice + 1.0, True, True, BLOCK)
    below, mass_below, one = _before(logits, V, top, temperature, at, BLOCK)
    nth = (choice - below).to(tl.int32)  # among the candidates at the threshold, by id

    seen = tl.zeros([1], tl.int32)
    result = tl.zeros([1], tl.int64) + best
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        bits, weight = _load(logits, ids, V, top, temperature)
        tied = (bits == at).to(tl.int32)
        order = seen + tl.cumsum(tied, 0) - 1
        hit = (tied > 0) & (order == nth)
        result = tl.where(tl.max(hit.to(tl.int32), 0) > 0, tl.max(tl.where(hit, ids, 0), 0).to(tl.int64), result)
        seen += tl.sum(tied, 0)
    tl.store(Out + row, tl.max(result, 0))
