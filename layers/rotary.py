"""Rotary position embedding (Su et al.: RoFormer, 2021), neox style, and the scalings that stretch it.

The rotation of a token depends on its position alone, never on the length of the request or of the batch: KV that requests share
would be wrong otherwise. So dynamic NTK takes the longest length that is served in place of the current one; served no longer
than max_position_embeddings, it is the unscaled rope.

Legend: T tokens, H heads, D head dim, R = D / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

RopeTables = tuple[torch.Tensor, torch.Tensor]  # cos and sin of the step's tokens, each [T, 1, R]


class RotaryEmbedding(nn.Module):
    """cos/sin of all positions below max_len, in the model's dtype.

    kind is none, linear, dynamic, yarn or llama3; params holds what that scaling needs, under transformers' names.
    """

    def __init__(
        self, head_dim: int, max_len: int, theta: float, *, kind: str, params: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        super().__init__()
        inv_freq, magnitude = inverse_frequencies(head_dim, theta, max_len, kind=kind, params=params)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq.to(torch.get_default_device())
        self.cos = (angles.cos() * magnitude).to(dtype)
        self.sin = (angles.sin() * magnitude).to(dtype)

    def forward(self, positions: torch.Tensor) -> RopeTables:
        """Tables of int64 [T] positions, to be used by every layer of the step."""
        return self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None]


def inverse_frequencies(
    dim: int, theta: float, max_len: int, *, kind: str, params: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """float32 [R] on the CPU, and the factor that cos and sin are multiplied by."""
    if kind == "dynamic":
        theta = _dynamic_theta(dim, theta, max_len, params)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    inv_freq: torch.Tensor = 1.0 / (theta**exponents)
    if kind in ("none", "dynamic"):
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / params["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, params), 1.0
    if kind == "yarn":
        return _yarn(dim, theta, inv_freq, params)
    raise ValueError(f"unknown rope scaling {kind!r}; known are none, linear, dynamic, yarn, llama3")


def _dynamic_theta(dim: int, theta: float, max_len: int, params: Mapping[str, Any]) -> float:
    trained, factor = params["max_position_embeddings"], params["factor"]
    stretch = factor * max(max_len, trained) / trained - (factor - 1)
    return float(theta * stretch ** (dim / (dim - 2)))


def _llama3(inv_freq: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended (Llama 3.1's reference code)."""
    trained, factor = params["original_max_position_embeddings"], params["factor"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wavelen = 2 * math.pi / inv_freq
    blend = ((trained / wavelen - low) / (high - low)).clamp(0, 1)
    mixed: torch.Tensor = (1 - blend) * inv_freq / factor + blend * inv_freq
    return mixed


def _yarn(dim: int, theta: float, inv_freq: torch.Tensor, params: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Peng et al.: YaRN, 2023."""
    trained, factor = params["original_max_position_embeddings"], params["factor"]

    def correction_dim(num_rotations: float) -> float:
        return dim * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction_dim(params["beta_fast"]), correction_dim(params["beta_slow"])
    if params["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_magnitude(factor, params)


def _yarn_magnitude(factor: float, params: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params["attention_factor"] is not None:
        return float(params["attention_factor"])
    if params["mscale"] and params["mscale_all_dim"]:
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)
