"""The module that models call for attention over the KV pool."""

from __future__ import annotations

import torch
from torch import nn

from ..forward_batch import ForwardBatch
from .base import AttentionBackend, AttentionSpec


class Attention(nn.Module):
    """Attention of one layer, through the backend that it is bound to."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self._backend: AttentionBackend | None = None

    def bind(self, backend: AttentionBackend) -> None:
        """Use ``backend`` from here on."""
        self._backend = backend

    def forward(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H * D]."""
        if self._backend is None:
            raise RuntimeError("attention was called before a backend was bound to it")
        return self._backend.forward(q_THD, k_TKD, v_TKD, self.spec, batch).flatten(1)


def bind_attention(model: nn.Module, backend: AttentionBackend) -> None:
    """Bind every Attention of the model."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.bind(backend)
