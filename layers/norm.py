"""RMSNorm, computed in float32 (Zhang and Sennrich: Root mean square layer normalization, 2019)."""

from __future__ import annotations

import torch
from torch import nn

from .kernels.ops import current_ops
from .linear import weight


class RMSNorm(nn.Module):
    """x / rms(x) over the last dim, rounded to x's dtype, then times w."""

    def __init__(self, dim: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(dim, dtype=dtype)
        self.eps = eps
        ops = current_ops()
        self._norm, self._add_norm = ops.rms_norm, ops.add_rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + delta, x + delta), both [T, dim]."""
        return self._add_norm(x, delta, self.weight, self.eps)


class GemmaRMSNorm(RMSNorm):
    """x / rms(x) times (1 + w), rounded to x's dtype at the end."""

    def __init__(self, dim: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__(dim, eps=eps, dtype=dtype)
        ops = current_ops()
        self._norm, self._add_norm = ops.gemma_rms_norm, ops.gemma_add_rms_norm
