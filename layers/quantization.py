"""In which form the weights of linears are kept: packed for the native kernels, or as torch multiplies them.

int8: a symmetric scale per output channel, activations int8 with a scale per token. int4: groups of 32 inputs with a scale and a
minimum, activations int8 per token and group; the head is int8 then. gguf: the blocks of the file. Without native kernels
torch multiplies by the same quantised values in the model's dtype, and activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .kernels.cpu.library import Native
from .kernels.cpu.packed import GGUF_KINDS, Kind, PackedLinear, PackedWeight

QUANTIZATIONS = ("int8", "int4", "gguf")
GROUP = 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [n, k] as a GGUF file holds it: ``data`` is uint8 [n, bytes of a row]; ``dense`` decodes it to float32."""

    type_name: str
    data: torch.Tensor
    shape: tuple[int, ...]
    dense: Callable[[], torch.Tensor]

    @property
    def packable(self) -> bool:
        """Whether the kernels can keep it as it is."""
        return len(self.shape) == 2 and self.type_name in GGUF_KINDS


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The form of linears, and of the head. ``native`` None: torch multiplies."""

    linear: Kind
    head: Kind
    native: Native | None

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, blocks: Mapping[int, Blocks], kind: Kind | None = None
    ) -> PackedLinear | None:
        """The packed linear; None without native kernels: then ``weight`` itself was changed to the values of the form.

        ``blocks`` maps the first of the rows that came as blocks, whose place in ``weight`` is not filled, to them.
        """
        kind = self.linear if kind is None else kind
        if self.native is None:
            quantized_values_(weight, kind)
            return None
        parts: list[PackedWeight] = []
        row = 0
        while row < weight.shape[0]:
            if row in blocks:
                run = _run_of(blocks, row)
                parts.append(
                    PackedWeight.of_blocks(self.native, run[0].type_name, torch.cat([b.data for b in run]), weight.shape[1])
                )
                row += parts[-1].n
            else:
                end = min((start for start in blocks if start > row), default=weight.shape[0])
                parts.append(PackedWeight.pack(self.native, kind, weight[row:end]))
                row = end
        return PackedLinear(parts, bias)

    def pack_head(self, weight: torch.Tensor, bias: torch.Tensor | None, blocks: Mapping[int, Blocks]) -> PackedLinear | None:
        """The same for the head."""
        return self.pack(weight, bias, blocks, self.head)


def weight_format(quantization: str | None, dtype: torch.dtype, native: Native | None) -> WeightFormat | None:
    """The form for a quantisation, or for plain weights of ``dtype``; None: leave weights as they are.

    Raises ValueError for an unknown quantisation.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"unknown quantization {quantization!r}; known are {', '.join(QUANTIZATIONS)}")
    if quantization == "int8":
        return WeightFormat(Kind.I8, Kind.I8, native)
    if quantization == "int4":
        return WeightFormat(Kind.Q4, Kind.I8, native)
    if native is None:
        return None
    kind = Kind.BF16 if dtype is torch.bfloat16 else Kind.F32
    return WeightFormat(kind, kind, native)


def quantized_values_(weight: torch.Tensor, kind: Kind) -> None:
    """Replace a float weight by the values that its quantised form stands for, exactly those of the native kernels."""
    if kind is Kind.I8:
        w = weight.float()
        scale = w.abs().amax(1, keepdim=True) / 127
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        weight.copy_(torch.round(w * inverse).clamp_(-127, 127) * scale)
    elif kind is Kind.Q4:
        n, k = weight.shape
        w = torch.nn.functional.pad(weight.float(), (0, -k % GROUP)).view(n, -1, GROUP)
        low, high = w.amin(2, keepdim=True), w.amax(2, keepdim=True)
        d, m = ((high - low) / 15).half().float(), low.half().float()
        inverse = torch.where(d > 0, 1 / d, 0.0)
        q = torch.round((w - m) * inverse).clamp_(0, 15)
        weight.copy_((q * d + m).view(n, -1)[:, :k])


def _run_of(blocks: Mapping[int, Blocks], row: int) -> list[Blocks]:
    """The blocks from ``row`` on that follow each other and are of one type: they are packed as one weight."""
    run = [blocks[row]]
    row += run[0].shape[0]
    while row in blocks and blocks[row].type_name == run[0].type_name:
        run.append(blocks[row])
        row += run[-1].shape[0]
    return run
