"""A reader of GGUF files, versions 2 and 3: metadata and tensor table are parsed at once, data is mapped.

Nothing in the file is trusted: every length is held against the file's size before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .gguf_quants import Floats, GGUFError, block_size, dequantize, tensor_type

__all__ = ["GGUFError", "GGUFFile", "GGUFTensor"]

MAGIC = b"GGUF"
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. ``shape`` is row-major, as torch says it (the file lists it the other way round)."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # from the start of the file
    nbytes: int


class GGUFFile:
    """One GGUF file. ``metadata`` holds numbers, strings, lists of strings and arrays of numbers; ``tensors`` is in file order.

    Raises GGUFError where the file is not whole, OSError where it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as f:
            magic = f.read(4)
            if magic != MAGIC:
                raise GGUFError(f"{path} is not a GGUF file")
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = len(self._map)
        self._pos = 4
        try:
            self._parse()
        except GGUFError as e:
            raise GGUFError(f"{path}: {e}") from None
        except (struct.error, UnicodeDecodeError) as e:
            raise GGUFError(f"{path}: damaged at byte {self._pos}: {e}") from None

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, a read-only view of the mapped file. Raises KeyError."""
        t = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, count=t.nbytes, offset=t.offset)

    def tensor(self, name: str) -> Floats:
        """A tensor as float32 of its shape, in memory of its own. Raises KeyError, GGUFError for a type that cannot be decoded."""
        t = self.tensors[name]
        try:
            return dequantize(self.raw(name), t.type).reshape(t.shape)
        except GGUFError as e:
            raise GGUFError(f"{self.path}: {name}: {e}") from None

    def part(self, name: str, dim: int, start: int, stop: int) -> Floats:
        """The rows (dim 0) or columns (dim 1) [start, stop) of a tensor, of which only the blocks that hold them are read.

        Raises what ``tensor`` raises, and GGUFError where the tensor is smaller.
        """
        t = self.tensors[name]
        if dim >= len(t.shape) or stop > t.shape[dim]:
            raise GGUFError(
                f"{self.path}: {name} has shape {list(t.shape)}, which has no part [{start}, {stop}) of dimension {dim}"
            )
        if len(t.shape) == 1:
            return self.tensor(name)[start:stop]
        num_rows = t.shape[0]
        rows = self.raw(name).reshape(num_rows, -1)
        if dim == 0:
            return dequantize(np.ascontiguousarray(rows[start:stop]).reshape(-1), t.type).reshape(stop - start, *t.shape[1:])
        block = block_size(t.type)
        first, last = start // block, -(-stop // block)
        blocks = rows.reshape(num_rows, t.shape[1] // block, -1)[:, first:last]
        data = dequantize(np.ascontiguousarray(blocks).reshape(-1), t.type).reshape(num_rows, -1)
        return np.ascontiguousarray(data[:, start - first * block : stop - first * block])

    def _parse(self) -> None:
        self.version = self._u32()
        if self.version not in (2, 3):
            raise GGUFError(f"GGUF version {self.version} is not supported (little-endian versions 2 and 3 are)")
        num_tensors, num_values = self._u64(), self._u64()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in self.metadata:
                raise GGUFError(f"metadata key {key} occurs twice")
            self.metadata[key] = self._value(self._u32())
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise GGUFError(f"alignment {alignment!r} is not a power of two")
        table = [self._tensor_entry() for _ in range(num_tensors)]
        start = -(-self._pos // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in table:
            if name in self.tensors:
                raise GGUFError(f"tensor {name} occurs twice")
            self.tensors[name] = self._place(name, shape, type_id, start + offset)

    def _place(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        kind, block, block_bytes = tensor_type(type_id)
        if not shape or min(shape) == 0 or shape[-1] % block:
            raise GGUFError(f"tensor {name} has shape {shape}, which is not whole blocks of {kind}")
        nbytes = math.prod(shape) // block * block_bytes
        if offset + nbytes > self._size:
            raise GGUFError(f"tensor {name} ends at byte {offset + nbytes}, the file at {self._size}: it is truncated")
        return GGUFTensor(name, shape, kind, offset, nbytes)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._u32()
        if num_dims > MAX_DIMS:
            raise GGUFError(f"tensor {name} claims {num_dims} dimensions")
        dims = tuple(self._u64() for _ in range(num_dims))
        return name, dims[::-1], self._u32(), self._u64()

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._map, self._pos)
        self._pos += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._map, self._pos)
        self._pos += 8
        return int(value)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # A vocabulary is a quarter of a million of these, hence the locals.
        data, pos, size, unpack = self._map, self._pos, self._size, _U64.unpack_from
        out: list[str] = []
        for _ in range(count):
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            if pos > size:
                raise GGUFError(f"a string at byte {start} ends behind the end of the file")
            out.append(str(data[start:pos], "utf-8"))
        self._pos = pos
        return out

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._u32(), self._u64()
            if item == _STRING:
                return self._strings(count)
            return self._numbers(item, count)
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise GGUFError(f"damaged at byte {self._pos}: metadata type {kind} is not known")
        if self._pos + count * dtype.itemsize > self._size:
            raise GGUFError(f"an array at byte {self._pos} ends behind the end of the file")
        values = np.frombuffer(self._map, dtype, count=count, offset=self._pos).copy()
        self._pos += values.nbytes
        return values
