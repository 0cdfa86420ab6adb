"""The reference backend: gathers the KV of each request from the pool and calls torch's scaled_dot_product_attention. Any device.

Query heads that share a KV head are never expanded into copies: a decode step folds them into the query length, [K, G, D]; an
extend step lays them out as heads over keys that are broadcast with stride 0.

Masks: with keys counted from the right, what a block of queries may see does not depend on where the block stands, so one
template per window serves every block of every step.

Legend: T tokens, B requests, H query heads, K KV heads, G = H / K, D head dim, L keys, Q queries of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ...mem_cache.kv_pool import KVPool
from ..forward_batch import ForwardBatch
from .base import AttentionSpec

QUERY_BLOCK = 256  # queries that are attended at once: bounds the mask, and skips keys above the diagonal and left of the window
PADDED_MAX_LEN = 256  # decode requests up to this many keys are padded into one call; beyond, one call each is faster


@dataclass(slots=True)
class _Request:
    """A request attended on its own: tokens [start, start + num_queries) of the step over ``slots``, its last keys."""

    start: int
    num_queries: int
    slots: torch.Tensor | None  # int64 [L]; None: the keys are exactly the step's own tokens, nothing is gathered


@dataclass(slots=True)
class _Padded:
    """Decode requests attended in one call, their keys aligned at the right."""

    tokens: torch.Tensor  # int64 [B], index of each query in the step
    slots: torch.Tensor  # int64 [B * L], scratch where a request has fewer than L keys
    mask: torch.Tensor  # [B, 1, 1, L], 0 or -inf
    whole_step: bool  # tokens is [0, T)


@dataclass(slots=True)
class _Plan:
    padded: _Padded | None
    requests: list[_Request]


class TorchNativeBackend:
    """AttentionBackend of plain torch."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._dtype = pool.compute_dtype
        self._device = pool.k(0).device
        self._plans: dict[int | None, _Plan] = {}
        self._templates: dict[int | None, torch.Tensor] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last step's plan; each window is planned when its first layer runs."""
        self._plans.clear()

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        self._pool.write(layer.layer_id, batch.out_cache_loc, k_TKD, v_TKD)
        window = layer.sliding_window
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._make_plan(batch, window)
        if plan.padded is not None and plan.padded.whole_step:
            return self._forward_padded(q_THD, layer, plan.padded)
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if plan.padded is not None:
            out.index_copy_(
                0, plan.padded.tokens, self._forward_padded(q_THD.index_select(0, plan.padded.tokens), layer, plan.padded)
            )
        for request in plan.requests:
            tokens = slice(request.start, request.start + request.num_queries)
            if request.slots is None:
                k_LKD, v_LKD = k_TKD[tokens], v_TKD[tokens]
            else:
                k_LKD, v_LKD = self._pool.gather(layer.layer_id, request.slots)
            self._forward_request(q_THD[tokens], k_LKD, v_LKD, layer, out[tokens])
        return out

    # --- planning ---------------------------------------------------------------------------------------------------------------

    def _make_plan(self, batch: ForwardBatch, window: int | None) -> _Plan:
        """Choose the path of each request and look its slots up. A query at position p sees the keys (p - window, p]."""
        starts = np.cumsum(batch.extend_lens_host) - batch.extend_lens_host
        reach = batch.seq_lens_host if window is None else batch.extend_lens_host + window - 1
        num_keys = np.minimum(batch.seq_lens_host, reach)
        short = (batch.extend_lens_host == 1) & (num_keys <= PADDED_MAX_LEN)
        padded = None
        if np.count_nonzero(short) > 1:
            padded = self._plan_padded(batch, np.flatnonzero(short), starts, num_keys)
        else:
            short[:] = False
        requests = [self._plan_request(batch, int(b), int(starts[b]), int(num_keys[b])) for b in np.flatnonzero(~short)]
        return _Plan(padded=padded, requests=requests)

    def _plan_request(self, batch: ForwardBatch, b: int, start: int, num_keys: int) -> _Request:
        num_queries, seq_len = int(batch.extend_lens_host[b]), int(batch.seq_lens_host[b])
        if num_queries == seq_len and self._pool.exact:
            return _Request(start, num_queries, None)
        row = batch.req_to_token[batch.rows[b]]
        return _Request(start, num_queries, row[seq_len - num_keys : seq_len].long())

    def _plan_padded(self, batch: ForwardBatch, which: np.ndarray, starts: np.ndarray, num_keys: np.ndarray) -> _Padded:
        length = int(num_keys[which].max())
        index = torch.from_numpy(which).to(self._device)
        lens = torch.from_numpy(num_keys[which]).to(self._device)
        from_right = torch.arange(length - 1, -1, -1, device=self._device)  # 0 is a request's newest key
        valid_BL = from_right[None] < lens[:, None]
        cells = (batch.seq_lens[index][:, None] - 1 - from_right[None]).clamp_(min=0)
        slots_BL = batch.req_to_token[batch.rows[index][:, None], cells].long() * valid_BL
        mask_BL = torch.zeros(valid_BL.shape, dtype=self._dtype, device=self._device).masked_fill_(~valid_BL, -math.inf)
        return _Padded(
            tokens=torch.from_numpy(starts[which]).to(self._device),
            slots=slots_BL.flatten(),
            mask=mask_BL[:, None, None],
            whole_step=len(which) == len(starts),
        )

    def _mask(self, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
        """[Q, L], 0 or -inf: the last query sees the last key, and each query the keys at distances [0, window)."""
        template = self._templates.get(window)
        if template is None or template.shape[1] < num_keys:
            length = 1 << max(num_keys - 1, QUERY_BLOCK - 1).bit_length()
            query = torch.arange(QUERY_BLOCK - 1, -1, -1, device=self._device)  # counted from the right, as the keys
            distance = torch.arange(length - 1, -1, -1, device=self._device)[None] - query[:, None]
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            template = torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, -math.inf)
            self._templates[window] = template
        return template[QUERY_BLOCK - num_queries :, template.shape[1] - num_keys :]

    # --- attending --------------------------------------------------------------------------------------------------------------

    def _forward_padded(self, q_BHD: torch.Tensor, layer: AttentionSpec, padded: _Padded) -> torch.Tensor:
        num_requests = q_BHD.shape[0]
        q_BKGD = q_BHD.reshape(num_requests, layer.num_kv_heads, -1, layer.head_dim)
        k, v = self._pool.gather(layer.layer_id, padded.slots)
        shape = (num_requests, -1, layer.num_kv_heads, layer.head_dim)
        out = _attend(q_BKGD, k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2), padded.mask, layer)
        return out.reshape(num_requests, layer.num_heads, layer.head_dim)

    def _forward_request(
        self, q_QHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, layer: AttentionSpec, out_QHD: torch.Tensor
    ) -> None:
        """Attend from the queries of one request, the last of its L keys, into out_QHD."""
        num_queries, num_keys, kv_heads, head_dim = q_QHD.shape[0], k_LKD.shape[0], layer.num_kv_heads, layer.head_dim
        if num_queries == 1:
            q_1KGD = q_QHD.reshape(1, kv_heads, -1, head_dim)
            out = _attend(q_1KGD, k_LKD.transpose(0, 1)[None], v_LKD.transpose(0, 1)[None], None, layer)
            out_QHD.copy_(out.reshape(1, layer.num_heads, head_dim))
            return
        groups = layer.num_heads // kv_heads
        q_KGQD = q_QHD.reshape(num_queries, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        out_KGQD = out_QHD.view(num_queries, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        k_KGLD = k_LKD.transpose(0, 1)[:, None].expand(-1, groups, -1, -1)
        v_KGLD = v_LKD.transpose(0, 1)[:, None].expand(-1, groups, -1, -1)
        for start in range(0, num_queries, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, num_queries)
            last = num_keys - num_queries + end  # keys [first, last) are seen by this block
            first = 0 if layer.sliding_window is None else max(0, last - (end - start) - layer.sliding_window + 1)
            mask = self._mask(end - start, last - first, layer.sliding_window)
            keys = (slice(None), slice(None), slice(first, last))
            out_KGQD[:, :, start:end] = _attend(q_KGQD[:, :, start:end], k_KGLD[keys], v_KGLD[keys], mask, layer)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, layer: AttentionSpec) -> torch.Tensor:
    """softmax(q k^T) v over the last two dims, with the layer's scale and soft cap; mask is added to the scores."""
    if layer.soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * layer.scale
    scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)
