"""Packed weights of linears, and the product with them."""

from __future__ import annotations

import ctypes
import enum
import mmap
from collections.abc import Sequence

import torch

from .library import LinearStruct, Native

ALIGNMENT = 64
HUGE = 2 << 20  # bytes from which huge pages are asked for


class Kind(enum.IntEnum):
    """bny_kind of kernels.h."""

    F32 = 0
    BF16 = 1
    I8 = 2
    Q4 = 3
    Q8 = 4
    Q4K = 5
    Q6K = 6


GGUF_KINDS = {"Q4_0": (2, Kind.Q4), "Q4_1": (3, Kind.Q4), "Q8_0": (8, Kind.Q8), "Q4_K": (12, Kind.Q4K), "Q6_K": (14, Kind.Q6K)}


class PackedWeight:
    """One weight [n, k] in the layout of the kernels, which owns its memory."""

    def __init__(self, native: Native, kind: Kind, n: int, k: int) -> None:
        """Room for it, unfilled. Raises ValueError where the kind cannot hold such a weight."""
        nbytes = int(native.lib.bny_linear_bytes(kind, n, k))
        if nbytes < 0:
            raise ValueError(f"a weight [{n}, {k}] cannot be packed as {kind.name}")
        self.native, self.kind, self.n, self.k = native, kind, n, k
        self.data = aligned(nbytes)

    @classmethod
    def pack(cls, native: Native, kind: Kind, weight: torch.Tensor) -> PackedWeight:
        """Pack, and quantise to ``kind``, a weight [n, k] on the CPU, float32 or bfloat16, whose rows are contiguous."""
        if weight.device.type != "cpu" or weight.dim() != 2 or weight.stride(1) != 1 or weight.numel() == 0:
            raise ValueError("a weight to pack must be a matrix on the CPU with contiguous rows")
        if kind in (Kind.Q4K, Kind.Q6K):
            raise ValueError(f"{kind.name} comes from blocks of a file only")
        packed = cls(native, kind, weight.shape[0], weight.shape[1])
        if weight.dtype is torch.bfloat16 and kind is Kind.BF16:
            native.lib.bny_pack_bf16(packed.n, packed.k, weight.data_ptr(), weight.stride(0), packed.data.data_ptr())
        else:
            source = weight.float()
            native.lib.bny_pack_f32(kind, packed.n, packed.k, source.data_ptr(), source.stride(0), packed.data.data_ptr())
        return packed

    @classmethod
    def of_blocks(cls, native: Native, type_name: str, blocks: torch.Tensor, k: int) -> PackedWeight:
        """Repack a GGUF tensor, uint8 [n, bytes of a row of k values], without changing a value. ``type_name`` is in GGUF_KINDS."""
        type_id, kind = GGUF_KINDS[type_name]
        packed = cls(native, kind, blocks.shape[0], k)
        blocks = blocks.contiguous()
        native.lib.bny_pack_gguf(type_id, packed.n, k, blocks.data_ptr(), packed.data.data_ptr())
        return packed

    def unpack(self) -> torch.Tensor:
        """float32 [n, k]: the values that the kernels multiply by."""
        out = torch.empty(self.n, self.k, dtype=torch.float32)
        struct = LinearStruct(kind=self.kind, n=self.n, k=self.k, data=self.data.data_ptr())
        self.native.lib.bny_unpack(ctypes.addressof(struct), out.data_ptr())
        return out


class PackedLinear:
    """y = x W^T + b over packed weights, whose rows follow each other. ``struct`` is its bny_linear_t, valid while this lives."""

    def __init__(self, weights: Sequence[PackedWeight], bias: torch.Tensor | None) -> None:
        self.native = weights[0].native
        self.n, self.k = sum(w.n for w in weights), weights[0].k
        if any(w.k != self.k for w in weights) or (bias is not None and bias.shape != (self.n,)):
            raise ValueError("the parts of a linear do not fit each other")
        self.weights = list(weights)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._links = [LinearStruct(kind=w.kind, n=w.n, k=w.k, data=w.data.data_ptr()) for w in weights]
        start = 0
        for link, following in zip(self._links, [*self._links[1:], None], strict=True):
            if self.bias is not None:
                link.bias = ctypes.cast(self.bias[start:].data_ptr(), ctypes.POINTER(ctypes.c_float))
            if following is not None:
                link.next = ctypes.pointer(following)
            start += link.n
        self.address = ctypes.addressof(self._links[0])
        self._scratch = aligned(0)

    @property
    def struct(self) -> LinearStruct:
        """The first link of the chain."""
        return self._links[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(w.data.numel() for w in self.weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[m, k] -> float32 [m, n]. x is computed in float32; anything else is converted first."""
        if x.dim() != 2 or x.shape[1] != self.k:
            raise ValueError(f"a linear of {self.k} inputs got {list(x.shape)}")
        x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        m = x.shape[0]
        y = torch.empty(m, self.n, dtype=torch.float32)
        if m == 0:
            return y
        lib = self.native.lib
        need = int(lib.bny_linear_scratch(self.address, m))
        if need > self._scratch.numel():
            self._scratch = aligned(need)
        lib.bny_linear(self.address, x.data_ptr(), x.stride(0), y.data_ptr(), self.n, m, self._scratch.data_ptr())
        return y


def aligned(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], not initialised, aligned for the kernels; large ones on huge pages where the system allows."""
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        block = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        start = -block.data_ptr() % ALIGNMENT
        return block[start : start + nbytes]
    size = -(-nbytes // HUGE) * HUGE + HUGE
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(area, dtype=torch.uint8)
    start = -block.data_ptr() % HUGE
    return block[start : start + nbytes]
