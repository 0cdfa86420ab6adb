"""The engine's only source of randomness in sampling: a counter-based hash.

The draw for position p of a request with seed s is a pure function of (s, p), so that the same seed gives the same tokens in any
batch, after any retraction and on any rank.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [S] in [0, 1), one draw for each pair of int64 seed and position."""
    state = _mix(seeds.astype(np.uint64) + _GOLDEN)
    bits = _mix(state + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)) * 2.0**-53
