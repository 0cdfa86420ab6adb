"""FlashAttention 3 through sgl-kernel (Shah et al., 2024): GPUs of compute capability 8.x and 9.x.

The library takes a dense table of pages and lengths on the device, so that nothing but sizes is planned on the host.
"""

from __future__ import annotations

import torch

from ...mem_cache.kv_pool import KVPool
from ..forward_batch import ForwardBatch
from ..upload import upload
from .base import AttentionSpec
from .pages import indptr_of, page_table

VERSION = 3  # of FlashAttention


class FlashAttention3Backend:
    """AttentionBackend over sgl_kernel's flash_attn_with_kvcache. Recordable."""

    def __init__(self, pool: KVPool) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._attend = flash_attn_with_kvcache
        self._pool = pool
        self._page = pool.page_size
        self._lens = self._cu_q = self._table = torch.empty(0, dtype=torch.int32)
        self._max_q = 0
        self._recorded: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Lengths as int32, and the pages of each request."""
        self._max_q = int(batch.extend_lens_host.max(initial=1))
        self._lens = batch.seq_lens.to(torch.int32)
        self._cu_q = upload(indptr_of(batch.extend_lens_host).numpy(), batch.rows.device)
        self._table = page_table(batch, self._num_pages(int(batch.seq_lens_host.max(initial=1))), self._page)

    def plan_capture(self, batch: ForwardBatch) -> None:
        """Tensors that a recorded decode step reads, wide enough for the longest request."""
        size, device = len(batch.rows), batch.rows.device
        table = torch.zeros((size, self._num_pages(batch.req_to_token.shape[1])), dtype=torch.int32, device=device)
        lens = torch.ones(size, dtype=torch.int32, device=device)
        cu_q = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._recorded[size] = self._lens, self._cu_q, self._table = lens, cu_q, table
        self._max_q = 1
        self.plan_replay(batch)

    def plan_replay(self, batch: ForwardBatch) -> None:
        """Copy lengths and pages to where the recorded step reads them."""
        lens, _, table = self._recorded[len(batch.rows)]
        num_pages = self._num_pages(int(batch.seq_lens_host.max(initial=1)))
        lens.copy_(batch.seq_lens)
        table[:, :num_pages].copy_(page_table(batch, num_pages, self._page))

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        self._pool.write(layer.layer_id, batch.out_cache_loc, k_TKD, v_TKD)
        paged = (-1, self._page, layer.num_kv_heads, layer.head_dim)
        window = (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)
        out: torch.Tensor = self._attend(
            q=q_THD.contiguous(),
            k_cache=self._pool.k(layer.layer_id).view(paged),
            v_cache=self._pool.v(layer.layer_id).view(paged),
            cache_seqlens=self._lens,
            page_table=self._table,
            cu_seqlens_q=self._cu_q,
            max_seqlen_q=self._max_q,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window,
            softcap=layer.soft_cap or 0.0,
            ver=VERSION,
        )
        return out

    def _num_pages(self, length: int) -> int:
        return -(-length // self._page)
