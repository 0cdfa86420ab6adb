"""Parameters of rows to sample, and what one row samples in plain float64."""

from __future__ import annotations

import numpy as np

from banyan.layers.rng import uniforms
from banyan.layers.sampling_input import TOP_K_ALL, SamplingInput


def params(n: int, *, temperature=1.0, top_p=1.0, top_k=TOP_K_ALL, min_p=0.0, seed=0, position=0, banned=()) -> SamplingInput:
    """Of n rows; each value is of one row or of all."""

    def fill(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (n,)).copy()

    return SamplingInput(
        fill(temperature, np.float32),
        fill(top_p, np.float32),
        fill(top_k, np.int32),
        fill(min_p, np.float32),
        fill(seed, np.int64),
        fill(position, np.int64),
        np.array([row for row, _ in banned], np.int32),
        np.array([token for _, token in banned], np.int32),
    )


def mixed_params(n: int, vocab_size: int, rng: np.random.Generator) -> SamplingInput:
    """Of n rows, each parameter on, off and at its edges."""
    return params(
        n,
        temperature=rng.choice([0.0, 1e-5, 0.5, 1.0, 1.7, 1e6], n, p=[0.1, 0.05, 0.25, 0.3, 0.25, 0.05]),
        top_p=rng.choice([1.0, 1 - 2**-24, 0.95, 0.5, 1e-6], n, p=[0.4, 0.1, 0.2, 0.2, 0.1]),
        top_k=rng.choice([TOP_K_ALL, 1, 2, 50, max(vocab_size - 1, 1), vocab_size], n, p=[0.4, 0.1, 0.1, 0.2, 0.1, 0.1]),
        min_p=rng.choice([0.0, 1e-30, 0.02, 0.5, 1.0], n, p=[0.5, 0.1, 0.2, 0.1, 0.1]),
        seed=rng.integers(-(2**63), 2**63 - 1, n),
        position=rng.integers(0, 10_000, n),
    )


def naive(logits: np.ndarray, p: SamplingInput, row: int) -> tuple[int, float]:
    """(id, distance of the draw from the nearest edge of its interval, relative to the mass), one row in plain float64."""
    x = logits.astype(np.float64)
    x[p.banned_ids[p.banned_rows == row]] = -np.inf
    if p.temperatures[row] < 1e-6 or p.top_ks[row] == 1:
        return int(x.argmax()), 1.0
    x = (x - x.max()) / np.float64(p.temperatures[row])
    order = np.argsort(-x, kind="stable")
    weights = np.exp(x[order])
    weights = weights[: p.top_ks[row]] / weights[: p.top_ks[row]].sum()
    edge = 1.0
    if p.top_ps[row] < 1:
        before = np.cumsum(weights) - weights
        edge = np.abs(before - p.top_ps[row]).min()
        weights = weights[before < p.top_ps[row]]
    if p.min_ps[row] > 0:
        edge = min(edge, np.abs(weights / weights[0] - p.min_ps[row]).min())
        weights = weights[weights >= p.min_ps[row] * weights[0]]
    cum = np.cumsum(weights) / weights.sum()
    u = uniforms(p.seeds[row : row + 1], p.positions[row : row + 1])[0]
    edge = min(edge, np.abs(cum[:-1] - u).min(initial=1.0))
    return int(order[min(np.searchsorted(cum, u, side="right"), len(cum) - 1)]), edge
