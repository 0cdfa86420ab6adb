"""Sampling parameters of one step as host arrays; imports no torch, so that the scheduler's side can fill it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

TOP_K_ALL = 1 << 30


@dataclass(slots=True)
class SamplingInput:
    """Sampling parameters of the S rows that sample, as arrays of length S."""

    temperatures: np.ndarray  # float32, 0 = greedy
    top_ps: np.ndarray  # float32, 1 = off
    top_ks: np.ndarray  # int32, TOP_K_ALL = off
    min_ps: np.ndarray  # float32, 0 = off
    seeds: np.ndarray  # int64, the request's seed
    positions: np.ndarray  # int64, index of the sampled token in its sequence: with the seed it determines the draw
    banned_rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # row in [0, S) of each banned pair
    banned_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # token id that row may not sample
