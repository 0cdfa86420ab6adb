"""FlashInfer (Ye et al., 2025): paged decode and prefill, planned on the host's lengths.

Prompts without a cached prefix attend to their own K and V and never read the pool. Behind a long prefix the new tokens attend to
themselves so, to the prefix by pages, and the two results are merged by log-sum-exp: FlashInfer's is to base 2 on both sides.
Layers that differ in window, soft cap, scale or heads are kinds of their own, each with its wrappers and its plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ...mem_cache.kv_pool import KVPool
from ..forward_batch import ForwardBatch
from .base import AttentionSpec
from .pages import indptr_of, page_list

WORKSPACE_BYTES = 256 << 20
MERGE_MIN_PREFIX = 2048  # cached tokens of a step from which new tokens and prefix are attended apart
TENSOR_CORE_GROUP = 4  # query heads of a KV head from which decode is a matrix product
LAYOUT = "NHD"


class _Kind(NamedTuple):
    """What FlashInfer fixes when it plans."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None
    soft_cap: float | None

    @classmethod
    def of(cls, layer: AttentionSpec) -> _Kind:
        return cls(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.sliding_window, layer.soft_cap)


class _Wrappers:
    """The wrappers of one kind. They share one workspace: the steps of a stream run one after the other."""

    def __init__(self, library: Any, workspace: torch.Tensor, kind: _Kind, fp8: bool) -> None:
        self._library, self._workspace = library, workspace
        self.tensor_cores = fp8 or kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP
        self.decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, LAYOUT, use_tensor_cores=self.tensor_cores)
        self.paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
        self.ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, LAYOUT)
        self.recorded: dict[int, Any] = {}
        self._indices = torch.empty(0, dtype=torch.int32)  # shared by the recorded sizes: one step runs at a time

    def recorded_decode(self, batch: ForwardBatch, max_pages: int) -> Any:
        """The decode wrapper of a recorded batch size: it owns the buffers that the recording reads."""
        size, device = len(batch.rows), batch.rows.device
        if size not in self.recorded:
            if len(self._indices) < size * max_pages:
                self._indices = torch.zeros(size * max_pages, dtype=torch.int32, device=device)
            self.recorded[size] = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=self.tensor_cores,
                paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=self._indices[: size * max_pages],
                paged_kv_last_page_len_buffer=torch.ones(size, dtype=torch.int32, device=device),
            )
        return self.recorded[size]


class FlashInferBackend:
    """AttentionBackend over FlashInfer's wrappers. Recordable."""

    def __init__(self, pool: KVPool) -> None:
        import flashinfer

        self._library = flashinfer
        self._pool = pool
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.k(0).device)
        self._wrappers: dict[_Kind, _Wrappers] = {}
        self._planned: dict[_Kind, str] = {}  # kind -> how this step attends
        self._current: dict[_Kind, Any] = {}  # kind -> the decode wrapper of this step
        self._recording = False

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last step's plans; each kind is planned when its first layer runs."""
        self._planned.clear()
        self._recording = False

    def plan_capture(self, batch: ForwardBatch) -> None:
        """Plan each kind into buffers that the recording reads. A step must have run before, so that the kinds are known."""
        self._planned.clear()
        self._recording = True
        self.plan_replay(batch)

    def plan_replay(self, batch: ForwardBatch) -> None:
        """Plan each kind again for the lengths of the batch."""
        max_pages = -(-batch.req_to_token.shape[1] // self._pool.page_size)
        for kind, wrappers in self._wrappers.items():
            self._current[kind] = wrappers.recorded_decode(batch, max_pages)
            self._plan_decode(self._current[kind], kind, batch)
            self._planned[kind] = "decode"

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        self._pool.write(layer.layer_id, batch.out_cache_loc, k_TKD, v_TKD)
        kind = _Kind.of(layer)
        how = self._planned.get(kind)
        if how is None:
            how = self._planned[kind] = self._make_plan(kind, batch)
        wrappers, q = self._wrappers[kind], q_THD.contiguous()
        if how == "decode":
            return self._run(self._current[kind], q, layer)
        if how == "paged":
            return self._run(wrappers.paged, q, layer)
        k, v = k_TKD.contiguous(), v_TKD.contiguous()
        if how == "ragged":
            out: torch.Tensor = wrappers.ragged.run(q, k, v)
            return out
        own, own_lse = wrappers.ragged.run(q, k, v, return_lse=True)
        old, old_lse = wrappers.paged.run(q, self._cache(layer), return_lse=True)
        merged: torch.Tensor = self._library.merge_state(own, own_lse, old, old_lse)[0]
        return merged

    # --- planning ---------------------------------------------------------------------------------------------------------------

    def _make_plan(self, kind: _Kind, batch: ForwardBatch) -> str:
        if self._recording:
            raise RuntimeError("a layer of an unknown kind cannot be planned while a step is recorded")
        wrappers = self._wrappers.get(kind)
        if wrappers is None:
            fp8 = self._dtype.itemsize == 1
            wrappers = self._wrappers[kind] = _Wrappers(self._library, self._workspace, kind, fp8)
        if batch.extend_lens_host.max(initial=1) == 1:
            self._current[kind] = wrappers.decode
            self._plan_decode(wrappers.decode, kind, batch)
            return "decode"
        num_prefix = int(batch.prefix_lens_host.sum())
        if num_prefix == 0:
            self._plan_ragged(wrappers.ragged, kind, batch)
            return "ragged"
        if num_prefix >= MERGE_MIN_PREFIX and kind.window is None:
            self._plan_ragged(wrappers.ragged, kind, batch)
            self._plan_paged(wrappers.paged, kind, batch, prefix_only=True)
            return "merged"
        self._plan_paged(wrappers.paged, kind, batch, prefix_only=False)
        return "paged"

    def _first(self, kind: _Kind, batch: ForwardBatch) -> np.ndarray:
        """The first token of each request that anyone sees, at the start of a page."""
        if kind.window is None:
            return np.zeros_like(batch.prefix_lens_host)
        first: np.ndarray = np.maximum(batch.prefix_lens_host - kind.window + 1, 0) // self._pool.page_size * self._pool.page_size
        return first

    def _plan_decode(self, wrapper: Any, kind: _Kind, batch: ForwardBatch) -> None:
        first = self._first(kind, batch)
        pages = page_list(batch, first, batch.seq_lens_host - first, self._pool.page_size)
        wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            kind.heads,
            kind.kv_heads,
            kind.dim,
            self._pool.page_size,
            **self._options(kind),
        )

    def _plan_paged(self, wrapper: Any, kind: _Kind, batch: ForwardBatch, *, prefix_only: bool) -> None:
        """Queries are aligned to the end of the pages, or see all of them where these are the prefix alone."""
        first = self._first(kind, batch)
        ends = batch.prefix_lens_host if prefix_only else batch.seq_lens_host
        pages = page_list(batch, first, ends - first, self._pool.page_size)
        wrapper.plan(
            indptr_of(batch.extend_lens_host),
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            kind.heads,
            kind.kv_heads,
            kind.dim,
            self._pool.page_size,
            causal=not prefix_only,
            **self._options(kind),
        )

    def _plan_ragged(self, wrapper: Any, kind: _Kind, batch: ForwardBatch) -> None:
        indptr = indptr_of(batch.extend_lens_host)
        options = self._options(kind) | {"kv_data_type": self._query_dtype(), "causal": True}
        wrapper.plan(indptr, indptr, kind.heads, kind.kv_heads, kind.dim, **options)

    def _options(self, kind: _Kind) -> dict[str, Any]:
        return {
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,  # tokens left of the query's own
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": self._query_dtype(),
            "kv_data_type": self._dtype,
        }

    # --- attending --------------------------------------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return self._pool.k(0).dtype

    def _query_dtype(self) -> torch.dtype:
        return self._pool.compute_dtype

    def _cache(self, layer: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, self._pool.page_size, layer.num_kv_heads, layer.head_dim)
        return self._pool.k(layer.layer_id).view(shape), self._pool.v(layer.layer_id).view(shape)

    def _run(self, wrapper: Any, q_THD: torch.Tensor, layer: AttentionSpec) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(q_THD, self._cache(layer))
        return out
