"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .kernels.cpu.packed import PackedLinear
from .linear import weight
from .onednn import ReorderedLinear
from .parallel import Group
from .quantization import Blocks, WeightFormat
from .scaled_linear import DeviceFormat, DeviceLinear


class Embedding(nn.Module):
    """Rows of the table, times ``scale``, which is rounded to the table's dtype first, as transformers does for Gemma."""

    def __init__(self, num_embeddings: int, dim: int, *, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__()
        self.weight = weight(num_embeddings, dim, dtype=dtype)
        self.packed: PackedLinear | None = None  # the same weight as a head
        self.scaled: DeviceLinear | None = None  # the same on a device
        self.reordered: ReorderedLinear | None = None  # the same in oneDNN's order
        self.blocks: dict[int, Blocks] = {}
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, dim]."""
        x = F.embedding(input_ids, self.weight)
        x = x if self.packed is None else x.float()
        return x if self.scale is None else x * self.scale

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """The table as a head: [N, dim] -> [N, num_embeddings]."""
        if self.scaled is not None:
            return self.scaled(hidden)
        if self.reordered is not None:
            return self.reordered(hidden)
        return F.linear(hidden, self.weight) if self.packed is None else self.packed(hidden)

    def pack(self, form: WeightFormat | DeviceFormat, dtype: torch.dtype) -> None:
        """Keep the weight packed, as a head, and rows in ``dtype`` for the lookup."""
        if isinstance(form, DeviceFormat):
            self.scaled = form.pack_head(self.weight, None, self.blocks)
            return
        self.packed = form.pack_head(self.weight, None, self.blocks)
        self.blocks = {}
        if self.packed is not None:
            self.weight = nn.Parameter(self.weight.to(dtype), requires_grad=False)

    def reorder(self) -> None:
        """Keep the weight in oneDNN's order too, as a head."""
        self.reordered = ReorderedLinear(self.weight, None)


class VocabParallelEmbedding(Embedding):
    """The rows [vocab.start, vocab.stop) of a table whose other rows the other ranks of a group hold."""

    def __init__(self, vocab: range, dim: int, *, group: Group, dtype: torch.dtype, scale: float | None) -> None:
        super().__init__(len(vocab), dim, dtype=dtype, scale=scale)
        self._vocab, self._group = vocab, group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        own = input_ids - self._vocab.start
        foreign = (own < 0) | (own >= len(self._vocab))
        x = F.embedding(own.masked_fill(foreign, 0), self.weight).masked_fill(foreign[:, None], 0)
        x = x if self.packed is None else x.float()
        x = self._group.all_reduce(x)  # exact: all but one of the terms are zero
        return x if self.scale is None else x * self.scale
