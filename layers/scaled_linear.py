"""Linears with quantised weights on a device: the operations of kernels/ops.py over weights that are quantised as they are loaded.

int8: a symmetric scale per output channel, activations int8 with a scale per token. fp8: the same in float8_e4m3. int4: groups of
32 inputs with a scale and a minimum, activations as they are; the head is int8 then. The values of int8 and int4 weights are those
of the native CPU kernels.

Legend: T tokens, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .kernels.ops import FusedOps, pack_int4

GROUP = 32
FORMATS = ("int8", "int4", "fp8")
FP8_CAPABILITY = (8, 9)


class ScaledLinear:
    """y = x W^T + b with W and, token by token, x in int8 or float8."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, ops: FusedOps) -> None:
        self.bias = bias
        self._quantize, self._mm = ops.quantize, ops.int8_mm if dtype is torch.int8 else ops.fp8_mm
        self.weight, self.scale = ops.quantize(weight, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return _nbytes(self.weight, self.scale)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] in the dtype of x."""
        if x_TK.shape[0] == 0:
            return x_TK.new_empty(0, self.weight.shape[0])
        x, scale = self._quantize(x_TK, self.weight.dtype)
        return self._mm(x, self.weight.T, scale, self.scale, x_TK.dtype, bias=self.bias)


class Int4Linear:
    """y = x W^T + b with W in groups of int4."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, ops: FusedOps) -> None:
        self.bias, self._mm = bias, ops.int4_mm
        self._padding = -weight.shape[1] % GROUP
        n = weight.shape[0]
        w = F.pad(weight.float(), (0, self._padding)).view(n, -1, GROUP)
        low, high = w.amin(2, keepdim=True), w.amax(2, keepdim=True)
        scale, minimum = ((high - low) / 15).half(), low.half()
        d = scale.float()
        q = torch.round((w - minimum.float()) * torch.where(d > 0, 1 / d, 0.0)).clamp_(0, 15)
        self.weight = pack_int4(q.view(n, -1), GROUP)
        self.scale, self.minimum = scale[..., 0].contiguous(), minimum[..., 0].contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, its scales and its minimums."""
        return _nbytes(self.weight, self.scale, self.minimum)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] in the dtype of x."""
        if x_TK.shape[0] == 0:
            return x_TK.new_empty(0, self.weight.shape[0])
        if self._padding:
            x_TK = F.pad(x_TK, (0, self._padding))
        return self._mm(x_TK, self.weight, self.scale, self.minimum, group=GROUP, bias=self.bias)


DeviceLinear = ScaledLinear | Int4Linear


@dataclass(frozen=True, slots=True)
class DeviceFormat:
    """The form of linears and heads on a device: one of FORMATS, and what multiplies."""

    quantization: str
    ops: FusedOps

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None, blocks: Mapping[int, object]) -> DeviceLinear:
        """The linear of a filled weight [N, K]. Raises ValueError for one that came as blocks of a file."""
        if blocks:
            raise ValueError("blocks of a GGUF file are for the CPU kernels")
        if self.quantization == "int4":
            return Int4Linear(weight, bias, self.ops)
        return ScaledLinear(weight, bias, torch.float8_e4m3fn if self.quantization == "fp8" else torch.int8, self.ops)

    def pack_head(self, weight: torch.Tensor, bias: torch.Tensor | None, blocks: Mapping[int, object]) -> DeviceLinear:
        """The same for the head, which int4 leaves in int8."""
        kind = "int8" if self.quantization == "int4" else self.quantization
        return DeviceFormat(kind, self.ops).pack(weight, bias, blocks)


def device_format(quantization: str | None, ops: FusedOps, capability: tuple[int, int]) -> DeviceFormat | None:
    """The form on a device of a compute capability; None: weights as they are. Raises ValueError for what it cannot have."""
    if quantization is None:
        return None
    if quantization not in FORMATS:
        raise ValueError(f"quantization {quantization} is for the CPU; on CUDA there are {', '.join(FORMATS)}")
    if quantization == "fp8" and capability < FP8_CAPABILITY:
        raise ValueError(f"quantization fp8 needs compute capability 8.9, this is {capability[0]}.{capability[1]}")
    return DeviceFormat(quantization, ops)


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
