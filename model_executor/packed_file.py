"""A file of a filled model's parameters and packed weights, which is mapped instead of loading and packing them again.

Layout: MAGIC, the length of the header (u64), its SHA-256, the header (JSON), and from a page boundary on the data, each piece at a
multiple of ALIGNMENT. A file appears under its name only when it is whole and on the disk, and is never written again; so what
can be wrong with it later is its length, or a header that is not the one that was written. Both are checked before it is mapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import nn

from ..layers.embedding import Embedding
from ..layers.kernels.cpu.library import Native
from ..layers.kernels.cpu.packed import Kind, PackedLinear, PackedWeight
from ..layers.linear import Linear

MAGIC = b"BNYPACK1"
ALIGNMENT = 64
PAGE = 4096
MAX_HEADER = 64 << 20  # bytes
_PREFIX = struct.Struct("<8sQ32s")
_POPULATE = getattr(mmap, "MADV_POPULATE_READ", 22)  # Linux 5.14
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class PackedFileError(Exception):
    """A file that is not whole, or not of this model. One line."""


class _Piece(msgspec.Struct, frozen=True):
    """A parameter (dtype, shape), or one packed weight (kind, shape [n, k]), of the module at ``path``."""

    path: str
    offset: int
    nbytes: int
    shape: list[int]
    name: str = ""  # of the parameter
    dtype: str = ""
    kind: int = -1


class _Header(msgspec.Struct, frozen=True):
    key: str
    size: int  # of the whole file
    pieces: list[_Piece]


class Mapped:
    """A checked file in memory, read-only to its pages: processes that map the same file share them."""

    def __init__(self, path: Path, key: str) -> None:
        """Raises PackedFileError, and OSError where there is no such file."""
        with path.open("rb") as file:
            self._header = _read_header(file.read(_PREFIX.size), file.read, key)
            self.nbytes = os.fstat(file.fileno()).st_size
            if self.nbytes != self._header.size:
                raise PackedFileError(f"{path} has {self.nbytes} bytes, its header says {self._header.size}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # a stray write stays in this process
        _populate(self._map)
        self._data = torch.frombuffer(self._map, dtype=torch.uint8)

    def fill(self, model: nn.Module, native: Native) -> None:
        """Give a model, whose shapes are those of the key, its parameters. Raises PackedFileError where one does not fit."""
        modules = dict(model.named_modules())
        packed: dict[str, list[PackedWeight]] = {}
        for piece in self._header.pieces:
            if (module := modules.get(piece.path)) is None:
                raise PackedFileError(f"the model has no module {piece.path}")
            data = self._data[piece.offset : piece.offset + piece.nbytes]
            if piece.kind < 0:
                shaped = data.view(DTYPES[piece.dtype]).view(piece.shape)
                setattr(module, piece.name, nn.Parameter(shaped, requires_grad=False))
            else:
                packed.setdefault(piece.path, []).append(_weight(native, piece, data))
        for path, weights in packed.items():
            module = modules[path]
            if not isinstance(module, Linear | Embedding):
                raise PackedFileError(f"the module {path} holds no packed weight")
            module.packed = PackedLinear(weights, getattr(module, "bias", None))
        if len(packed) != sum(isinstance(module, Linear) or module is getattr(model, "head", None) for module in modules.values()):
            raise PackedFileError("packed weights are missing")


def write(path: Path, model: nn.Module, key: str) -> None:
    """Write all that ``Mapped.fill`` restores, and return when it is on the disk. Raises OSError; ``path`` is then incomplete."""
    pieces: list[_Piece] = []
    data: list[torch.Tensor] = []
    at = 0

    def add(tensor: torch.Tensor, *, path: str, shape: list[int], name: str = "", dtype: str = "", kind: int = -1) -> None:
        nonlocal at
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        pieces.append(_Piece(path, at, flat.numel(), shape, name, dtype, kind))
        data.append(flat)
        at += _up(flat.numel(), ALIGNMENT)

    for module_path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            add(
                parameter,
                path=module_path,
                shape=list(parameter.shape),
                name=name,
                dtype=str(parameter.dtype).removeprefix("torch."),
            )
        if isinstance(module, Linear | Embedding) and module.packed is not None:
            for weight in module.packed.weights:
                add(weight.data, path=module_path, shape=[weight.n, weight.k], kind=int(weight.kind))
    header, start = _place(key, pieces, at)
    with path.open("wb") as file:
        file.write(_PREFIX.pack(MAGIC, len(header), hashlib.sha256(header).digest()) + header)
        for piece, flat in zip(pieces, data, strict=True):
            file.seek(start + piece.offset)
            file.write(flat.numpy().data)
        file.truncate(start + at)
        file.flush()
        os.fsync(file.fileno())


def size_of(model: nn.Module) -> int:
    """Bytes of its weights in whatever form; of packed ones about what ``write`` takes."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    linears = [module for module in model.modules() if isinstance(module, Linear | Embedding)]
    forms = [form for linear in linears for form in (linear.packed, linear.scaled, linear.reordered) if form is not None]
    return total + sum(form.nbytes for form in forms)


def _place(key: str, pieces: list[_Piece], nbytes: int) -> tuple[bytes, int]:
    """The header with offsets from the start of the file, and where the data begins."""
    start = 0
    while True:  # the header's length depends on the offsets in it
        placed = [msgspec.structs.replace(piece, offset=start + piece.offset) for piece in pieces]
        header = msgspec.json.encode(_Header(key, start + nbytes, placed))
        begin = _up(_PREFIX.size + len(header), PAGE)
        if begin <= start:
            return header, start
        start = begin


def _read_header(prefix: bytes, read: Callable[[int], bytes], key: str) -> _Header:
    if len(prefix) < _PREFIX.size:
        raise PackedFileError("the file ends in its first bytes")
    magic, length, digest = _PREFIX.unpack(prefix)
    if magic != MAGIC or length > MAX_HEADER:
        raise PackedFileError("the file does not begin as one of packed weights")
    text = read(length)
    if hashlib.sha256(text).digest() != digest:
        raise PackedFileError("the header is damaged")
    try:
        header = msgspec.json.decode(text, type=_Header)
    except msgspec.DecodeError as error:
        raise PackedFileError(f"the header cannot be read: {error}") from None
    if header.key != key:
        raise PackedFileError("the weights are another model's")
    for piece in header.pieces:
        wanted = math.prod(piece.shape) * DTYPES[piece.dtype].itemsize if piece.kind < 0 and piece.dtype in DTYPES else piece.nbytes
        inside = 0 <= piece.offset <= piece.offset + piece.nbytes <= header.size
        if not inside or piece.offset % ALIGNMENT or wanted != piece.nbytes or (piece.kind < 0 and piece.dtype not in DTYPES):
            raise PackedFileError(f"the extent of {piece.path} is none")
    return header


def _weight(native: Native, piece: _Piece, data: torch.Tensor) -> PackedWeight:
    try:
        weight = PackedWeight(native, Kind(piece.kind), *piece.shape)
    except (ValueError, TypeError) as error:
        raise PackedFileError(f"{piece.path}: {error}") from None
    if weight.data.numel() != data.numel():
        raise PackedFileError(f"{piece.path} has {data.numel()} bytes, the kernels expect {weight.data.numel()}")
    weight.data = data
    return weight


def _populate(area: mmap.mmap) -> None:
    """Map all pages now, large ones where the file system keeps such; an older kernel does it page by page, when they are read."""
    with contextlib.suppress(OSError):
        area.madvise(_POPULATE)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
