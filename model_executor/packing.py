"""Several host arrays as one buffer, so that a step crosses to a device in one copy; the parts come back as views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

ALIGNMENT = 16  # bytes; kernels may load 16 at once


class Part(NamedTuple):
    """Where one array lies."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def layout(arrays: Sequence[np.ndarray]) -> tuple[int, list[Part]]:
    """Bytes of the buffer, and the part of each array."""
    parts, at = [], 0
    for array in arrays:
        parts.append(Part(at, torch.from_numpy(np.empty(0, array.dtype)).dtype, array.shape))
        at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return at, parts


def fill(buffer: np.ndarray, arrays: Sequence[np.ndarray], parts: Sequence[Part]) -> None:
    """Copy the arrays to their parts of a uint8 buffer."""
    for array, part in zip(arrays, parts, strict=True):
        buffer[part.offset : part.offset + array.nbytes].view(array.dtype)[...] = array.reshape(-1)


def views(buffer: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """The parts of a uint8 tensor under their own dtypes and shapes."""
    found = []
    for offset, dtype, shape in parts:
        num_bytes = math.prod(shape) * dtype.itemsize
        found.append(buffer[offset : offset + num_bytes].view(dtype).view(shape))
    return found
