"""The native CPU backend: attention over the slots in place, one call per layer.

A query's keys are reduced in an order that depends on its position alone, so its result is the same bits in any batch, behind any
chunking, with or without a shared prefix.
"""

from __future__ import annotations

import ctypes

import torch

from ...mem_cache.kv_pool import KVPool
from ..forward_batch import ForwardBatch
from ..kernels.cpu.attention import KVStruct, NativeStep, kv_struct, supports
from ..kernels.cpu.library import Native, NotNative, native_kernels
from .base import AttentionSpec


class CpuBackend:
    """AttentionBackend over the native kernels. It computes in float32 whatever the model's dtype and the pool's."""

    def __init__(self, pool: KVPool, kernels: Native | None = None) -> None:
        """kernels: those of the process unless others are given. Raises ValueError without any or for a pool that does not fit."""
        found = kernels or native_kernels()
        if isinstance(found, NotNative):
            raise ValueError(f"attention backend cpu needs the native kernels: {found.why}")
        if (reason := supports(pool)) is not None:
            raise ValueError(f"attention backend cpu: {reason}")
        self._pool = pool
        self._lib = found.lib
        self._layers: dict[AttentionSpec, KVStruct] = {}
        self._step: NativeStep | None = None

    def plan(self, batch: ForwardBatch) -> None:
        """Find shared prefixes and check every slot of the step. Raises IndexError for one outside the pool."""
        self._step = NativeStep(batch, self._pool.num_slots + self._pool.page_size, share_prefixes=True)
        self._step.check(self._lib)

    @property
    def step(self) -> NativeStep:
        """The step that was planned last."""
        if self._step is None:
            raise RuntimeError("forward before plan")
        return self._step

    def layer(self, spec: AttentionSpec) -> KVStruct:
        """The struct of a layer, made and checked when it is first asked for."""
        found = self._layers.get(spec)
        if found is None:
            found = self._layers[spec] = kv_struct(self._pool, spec)
        return found

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        step, kv = ctypes.byref(self.step.struct), ctypes.byref(self.layer(layer))
        shape = (self.step.struct.num_tokens, layer.num_heads, layer.head_dim)
        if q_THD.shape != shape or k_TKD.shape != v_TKD.shape or k_TKD.shape != (shape[0], layer.num_kv_heads, layer.head_dim):
            raise ValueError(f"the step needs q {shape}, got {tuple(q_THD.shape)}, {tuple(k_TKD.shape)}, {tuple(v_TKD.shape)}")
        q, k, v = (_rows(x) for x in (q_THD, k_TKD, v_TKD))
        out = torch.empty(shape, dtype=torch.float32)
        self._lib.bny_kv_write(kv, step, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
        self._lib.bny_attention(kv, step, q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0))
        return out.to(q_THD.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """float32 with the heads of a token side by side; the same memory where it is so already."""
    x = x.float()
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
