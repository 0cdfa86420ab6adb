"""The backend of our own Triton kernels: any GPU that Triton compiles for, any page size, head dim, window and soft cap.

Keys are found through req_to_token token by token, so a page size means nothing here and nothing is planned on the host but how
many programs to start.
"""

from __future__ import annotations

import torch
import triton

from ...mem_cache.kv_pool import KVPool
from ..forward_batch import ForwardBatch
from ..kernels.triton.attention import attend_kernel, merge_kernel, store_kv_kernel
from .base import AttentionSpec

MAX_SPLITS = 16  # parts that the keys of one request are cut into
MIN_SPLIT = 256  # keys of a part at least
SPLIT_MAX_TOKENS = 8  # requests of a step that all compute at most this many tokens have their keys split


class TritonBackend:
    """AttentionBackend of Triton kernels. Recordable: a step of its plan reads nothing from the host but sizes."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._starts = torch.empty(0, dtype=torch.int64)
        self._max_extend = 0
        self._num_splits = 1
        self._recorded: dict[int, torch.Tensor] = {}  # recordings read them: they must outlive the next plan

    def plan(self, batch: ForwardBatch) -> None:
        """Sizes of the step's grids, from the lengths on the host."""
        self._max_extend = int(batch.extend_lens_host.max(initial=1))
        self._starts = torch.cumsum(batch.extend_lens, 0) - batch.extend_lens
        longest = int(batch.seq_lens_host.max(initial=1))
        self._num_splits = min(MAX_SPLITS, triton.cdiv(longest, MIN_SPLIT)) if self._max_extend <= SPLIT_MAX_TOKENS else 1

    def plan_capture(self, batch: ForwardBatch) -> None:
        """Plan a decode step that is about to be recorded: requests of any length may be replayed."""
        self._max_extend = 1
        self._starts = self._recorded[len(batch.rows)] = torch.arange(len(batch.rows), device=batch.rows.device)
        self._num_splits = MAX_SPLITS

    def plan_replay(self, batch: ForwardBatch) -> None:
        """Nothing: the kernels read lengths and rows from the recorded tensors."""

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        k_pool, v_pool = self._pool.k(layer.layer_id), self._pool.v(layer.layer_id)
        store_kv(k_TKD, v_TKD, k_pool, v_pool, batch.out_cache_loc)
        return attend(
            q_THD,
            k_pool,
            v_pool,
            layer,
            batch,
            starts=self._starts,
            max_extend=self._max_extend,
            num_splits=self._num_splits,
        )


def store_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Write a step's K and V to int64 slots [T] of the pool. Head dims are contiguous."""
    num_tokens, heads, dim = k_TKD.shape
    if k_TKD.stride(2) != 1 or v_TKD.stride(2) != 1:
        raise ValueError("the head dim of K and V must be contiguous")
    store_kv_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        k_pool,
        v_pool,
        slots,
        k_TKD.stride(0),
        k_TKD.stride(1),
        v_TKD.stride(0),
        v_TKD.stride(1),
        k_pool.stride(0),
        HEADS=heads,
        D=dim,
        BLOCK=triton.next_power_of_2(heads * dim),
    )


def block_sizes(dim: int, group: int, *, max_extend: int, elem_size: int) -> dict[str, int]:
    """Rows, keys and warps of a program: decode takes as few rows as a matrix product allows, extend as many as registers do."""
    block_d = max(16, triton.next_power_of_2(dim))
    rows = max(16, min(64, triton.next_power_of_2(max_extend * group)))
    if max_extend > SPLIT_MAX_TOKENS:
        rows = 128 if block_d <= 128 and elem_size == 2 else 64
    keys = 64 if block_d <= 128 and elem_size == 2 else 32
    return {"BLOCK_M": rows, "BLOCK_N": keys, "BLOCK_D": block_d, "num_warps": 8 if rows >= 128 else 4, "num_stages": 2}


def attend(
    q_THD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    layer: AttentionSpec,
    batch: ForwardBatch,
    *,
    starts: torch.Tensor,
    max_extend: int,
    num_splits: int,
) -> torch.Tensor:
    """[T, H, D]. K and V of the step are in the pool already; starts: int64 [B], index of each request's first token."""
    num_tokens, heads, dim = q_THD.shape
    if q_THD.stride(2) != 1:
        raise ValueError("the head dim of Q must be contiguous")
    group = heads // layer.num_kv_heads
    blocks = block_sizes(dim, group, max_extend=max_extend, elem_size=q_THD.element_size())
    out = torch.empty((num_tokens, heads, dim), dtype=q_THD.dtype, device=q_THD.device)
    split = num_splits > 1
    part = lse = out
    if split:
        part = torch.empty((num_tokens, heads, num_splits, dim), dtype=torch.float32, device=out.device)
        lse = torch.empty((num_tokens, heads, num_splits), dtype=torch.float32, device=out.device)
    grid = (triton.cdiv(max_extend * group, blocks["BLOCK_M"]), layer.num_kv_heads, len(batch.rows) * num_splits)
    attend_kernel[grid](
        q_THD,
        k_pool,
        v_pool,
        out,
        part,
        lse,
        batch.req_to_token,
        batch.rows,
        batch.seq_lens,
        batch.extend_lens,
        starts,
        layer.scale,
        layer.soft_cap or 0.0,
        layer.sliding_window or 0,
        num_splits,
        q_THD.stride(0),
        q_THD.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        out.stride(0),
        out.stride(1),
        batch.req_to_token.stride(0),
        GROUP=group,
        HEADS=heads,
        D=dim,
        MAX_SPLITS=MAX_SPLITS,
        MIN_SPLIT=MIN_SPLIT,
        SPLIT=split,
        CAP=layer.soft_cap is not None,
        WINDOW=layer.sliding_window is not None,
        **blocks,
    )
    if split:
        merge_kernel[(num_tokens, heads)](
            part, lse, out, num_splits, out.stride(0), out.stride(1), HEADS=heads, D=dim, BLOCK_D=blocks["BLOCK_D"], num_warps=2
        )
    return out
