"""Makes Triton's interpreter compute in bfloat16 and float8 as a GPU does. By itself it multiplies bfloat16 as raw bits, and rounds
to narrow floats without carrying into the exponent.

Conversions go through torch, to the nearest and ties to even; beyond what a float8 holds they saturate, as a GPU's do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float64: torch.float64,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_of(data: np.ndarray, dtype: Any) -> torch.Tensor:
    """The values that an interpreter's array stands for."""
    kind = TYPES[dtype]
    bits = np.ascontiguousarray(data).view(f"i{kind.itemsize}" if kind.itemsize > 1 else "u1")
    return torch.from_numpy(bits.copy()).view(kind)


def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Stands for the interpreter's own _convert_float."""
    values, kind = tensor_of(data, source), TYPES[target]
    if kind.itemsize == 1:
        most = torch.finfo(kind).max
        values = values.float().clamp(-most, most)
    return values.to(kind).view(BITS[kind.itemsize]).numpy().view(f"u{kind.itemsize}").reshape(data.shape)


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Products of exact factors, summed in the accumulator's type."""
    factors = []
    for x in (a, b):
        kind = x.dtype.scalar
        narrow = kind == tl.bfloat16 or (kind.is_floating() and kind.primitive_bitwidth == 8)
        factors.append(tensor_of(x.data, kind).float().numpy().reshape(x.data.shape) if narrow else x.data)
    total = np.matmul(*factors, dtype=d.data.dtype) + d.data
    return interpreter.TensorHandle(total, d.dtype.scalar)


def install() -> None:
    """For the whole process."""
    builder: Any = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar.is_int():
            return cast(self, cast(self, src, tl.float32), dst_type)
        return cast(self, src, dst_type)

    builder.cast_impl = cast_impl
    builder.create_dot = dot
    interpreter._convert_float = convert
