"""Attention in plain torch whose result for a token depends on its request's tokens alone, to the bit.

Queries are computed in tiles that lie fixed on the positions of a request: the query at position p is always row p % TILE of tile
p // TILE, and a tile always meets the same number of keys, from the first one that its window reaches to the tile's end. So the
shapes of all products follow from p. Rows of queries that are not in the step, and keys that are not there yet, are zeros.

Legend: H query heads, K KV heads, G = H / K, D head dim, L keys of a tile.
"""

from __future__ import annotations

import math

import torch

from ...mem_cache.kv_pool import KVPool
from ..forward_batch import ForwardBatch
from .base import AttentionSpec

TILE = 16


class TorchInvariantBackend:
    """AttentionBackend for deterministic inference without native kernels. CPU."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing is shared by the layers."""

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        self._pool.write(layer.layer_id, batch.out_cache_loc, k_TKD, v_TKD)
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        start = 0
        for row, prefix_len, seq_len in zip(
            batch.rows.tolist(), batch.prefix_lens_host.tolist(), batch.seq_lens_host.tolist(), strict=True
        ):
            own = slice(start, start + seq_len - prefix_len)
            self._forward_request(q_THD[own], batch.req_to_token[row, :seq_len], prefix_len, layer, out[own])
            start = own.stop
        return out

    def _forward_request(
        self, q_QHD: torch.Tensor, slots: torch.Tensor, prefix_len: int, layer: AttentionSpec, out_QHD: torch.Tensor
    ) -> None:
        """Attend from the tokens [prefix_len, len(slots)) of one request."""
        seq_len = len(slots)
        base = first_key(prefix_len // TILE, layer.sliding_window)
        k_LKD, v_LKD = self._gather(layer, slots[base:], -(-seq_len // TILE) * TILE - base)
        for tile in range(prefix_len // TILE, -(-seq_len // TILE)):
            lo, hi = max(tile * TILE, prefix_len), min((tile + 1) * TILE, seq_len)
            q_MHD = torch.zeros(TILE, *q_QHD.shape[1:], dtype=q_QHD.dtype)
            q_MHD[lo - tile * TILE : hi - tile * TILE] = q_QHD[lo - prefix_len : hi - prefix_len]
            first = first_key(tile, layer.sliding_window)
            keys = slice(first - base, (tile + 1) * TILE - base)
            out_MHD = _attend(q_MHD, k_LKD[keys], v_LKD[keys], _mask(tile, first, layer.sliding_window), layer)
            out_QHD[lo - prefix_len : hi - prefix_len] = out_MHD[lo - tile * TILE : hi - tile * TILE]

    def _gather(self, layer: AttentionSpec, slots: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the slots, with zeros up to ``length``."""
        padded = []
        for found in self._pool.gather(layer.layer_id, slots.long()):
            whole = torch.zeros(length, *found.shape[1:], dtype=found.dtype)
            whole[: len(slots)] = found
            padded.append(whole)
        return padded[0], padded[1]


def first_key(tile: int, window: int | None) -> int:
    """The first position whose key a tile meets: a multiple of TILE."""
    return 0 if window is None else max(tile * TILE - window + 1, 0) // TILE * TILE


def _mask(tile: int, first: int, window: int | None) -> torch.Tensor:
    """float32 [TILE, L], 0 or -inf."""
    query = torch.arange(tile * TILE, (tile + 1) * TILE)[:, None]
    distance = query - torch.arange(first, (tile + 1) * TILE)[None]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


def _attend(
    q_MHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, mask_ML: torch.Tensor, layer: AttentionSpec
) -> torch.Tensor:
    heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    groups = heads // kv_heads
    q_KND = q_MHD.view(TILE, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(kv_heads, groups * TILE, dim)
    scores = torch.bmm(q_KND, k_LKD.permute(1, 2, 0).contiguous()).float() * layer.scale
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    weights = (scores.view(kv_heads, groups, TILE, -1) + mask_ML).softmax(-1).view(kv_heads, groups * TILE, -1)
    out_KND = torch.bmm(weights.to(v_LKD.dtype), v_LKD.permute(1, 0, 2).contiguous())
    return out_KND.view(kv_heads, groups, TILE, dim).permute(2, 0, 1, 3).reshape(TILE, heads, dim)
