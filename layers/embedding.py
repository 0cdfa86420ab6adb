"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .linear import weight
from .parallel import Group


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


class VocabParallelEmbedding(Embedding):
    """The rows [vocab.start, vocab.stop) of a table whose other rows the other ranks of a group hold."""

    def __init__(self, vocab: range, dim: int, *, group: Group, dtype: torch.dtype, scale: float | None) -> None:
        super().__init__(len(vocab), dim, dtype=dtype, scale=scale)
        self._vocab, self._group = vocab, group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        own = input_ids - self._vocab.start
        foreign = (own < 0) | (own >= len(self._vocab))
        x = F.embedding(own.masked_fill(foreign, 0), self.weight).masked_fill(foreign[:, None], 0)
        x = self._group.all_reduce(x)  # exact: all but one of the terms are zero
        return x if self.scale is None else x * self.scale
