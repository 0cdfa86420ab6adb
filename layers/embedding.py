"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .linear import weight


class Embedding(nn.Module):
    """Rows of the table, times ``scale``, which is rounded to the table's dtype first, as transformers does for Gemma."""

    def __init__(self, num_embeddings: int, dim: int, *, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__()
        self.weight = weight(num_embeddings, dim, dtype=dtype)
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, dim]."""
        x = F.embedding(input_ids, self.weight)
        return x if self.scale is None else x * self.scale
