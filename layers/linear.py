"""Linear layers whose weights are filled by the loader."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that needs no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features, dtype=dtype)
        self.bias = weight(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several linears over the same input as one; part i owns the rows [offsets[i], offsets[i + 1]) of weight and bias."""

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, sum(out_features), bias=bias, dtype=dtype)
        self.sizes = list(out_features)

    def part(self, parameter: torch.Tensor, index: int) -> torch.Tensor:
        """View of one part's rows of ``weight`` or ``bias``, for the loader."""
        start = sum(self.sizes[:index])
        return parameter[start : start + self.sizes[index]]
