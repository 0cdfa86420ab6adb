"""RMSNorm, computed in float32 (Zhang and Sennrich: Root mean square layer normalization, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .linear import weight


class RMSNorm(nn.Module):
    """x / rms(x) over the last dim, rounded to x's dtype, then times w."""

    def __init__(self, dim: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(dim, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


class GemmaRMSNorm(RMSNorm):
    """x / rms(x) times (1 + w), rounded to x's dtype at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
