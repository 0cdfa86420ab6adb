"""Linear layers whose weights are filled by the loader."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .kernels.cpu.packed import PackedLinear
from .onednn import ReorderedLinear
from .quantization import Blocks, WeightFormat
from .scaled_linear import DeviceFormat, DeviceLinear


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that needs no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b. The weight is row-major until it is packed, and then in ``packed`` alone, and y is float32 from there on; on a
    device it is in ``scaled`` alone, where torch multiplies with oneDNN in ``reordered``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features, dtype=dtype)
        self.bias = weight(out_features, dtype=dtype) if bias else None
        self.packed: PackedLinear | None = None
        self.scaled: DeviceLinear | None = None
        self.reordered: ReorderedLinear | None = None
        self.blocks: dict[int, Blocks] = {}  # parts of the weight that came as blocks of a GGUF file, by their first row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scaled is not None:
            return self.scaled(x)
        if self.reordered is not None:
            return self.reordered(x)
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """The linear as a head."""
        return self.forward(hidden)

    def pack(self, form: WeightFormat | DeviceFormat, *, head: bool = False) -> None:
        """Bring the weight, which is filled, into the form."""
        if isinstance(form, DeviceFormat):
            self.scaled = (form.pack_head if head else form.pack)(self.weight, self.bias, self.blocks)
        else:
            self.packed = (form.pack_head if head else form.pack)(self.weight, self.bias, self.blocks)
            if self.packed is None:
                return
        self.blocks = {}
        self.weight = weight(0, dtype=self.weight.dtype)

    def reorder(self) -> None:
        """Leave the weight, which is filled and row-major, to oneDNN."""
        self.reordered = ReorderedLinear(self.weight, self.bias)
        self.weight = weight(0, dtype=self.weight.dtype)


class MergedLinear(Linear):
    """Several linears over the same input as one; part i owns the rows [offsets[i], offsets[i + 1]) of weight and bias."""

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, sum(out_features), bias=bias, dtype=dtype)
        self.sizes = list(out_features)

    def part(self, parameter: torch.Tensor, index: int) -> torch.Tensor:
        """View of one part's rows of ``weight`` or ``bias``, for the loader."""
        start = sum(self.sizes[:index])
        return parameter[start : start + self.sizes[index]]
