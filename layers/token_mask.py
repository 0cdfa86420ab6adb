"""Token masks of rows that follow a grammar: the last thing that changes logits before a token is chosen."""

from __future__ import annotations

import numpy as np
import torch

from .kernels.cpu.library import Native, native_kernels
from .late_mask import LateMask
from .upload import upload

# What to add to the logits of 8 tokens, by the byte of the mask that stands for them: 0 or -inf, [256, 8]. Adding rows of a table
# is ten times as fast as filling by a mask of bools.
_BIAS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0, np.float32(0), np.float32(-np.inf)
)


def apply_mask(logits_SV: torch.Tensor, mask: LateMask) -> None:
    """Set what the mask does not allow to -inf, in place. Waits until the mask is filled.

    S rows, V vocabulary; logits are float32. Raises ValueError for a mask that covers less than the vocabulary.
    """
    bits, vocab_size = mask.wait(), logits_SV.shape[1]
    if bits.shape[1] * 32 < vocab_size:
        raise ValueError(f"a mask of {bits.shape[1] * 32} tokens for a vocabulary of {vocab_size}")
    if logits_SV.device.type == "cpu":
        _apply_on_cpu(logits_SV, mask.rows, bits)
        return
    rows, words = upload(mask.rows.astype(np.int64), logits_SV.device), upload(bits, logits_SV.device)
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size].bool()
    logits_SV.index_copy_(0, rows, logits_SV.index_select(0, rows).masked_fill_(~allowed, float("-inf")))


def _apply_on_cpu(logits_SV: torch.Tensor, rows: np.ndarray, bits: np.ndarray) -> None:
    vocab_size, native = logits_SV.shape[1], native_kernels()
    if isinstance(native, Native) and logits_SV.dtype is torch.float32 and logits_SV.stride(1) == 1:
        own, words = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(bits, np.int32)
        if len(own) and not 0 <= own.min() <= own.max() < logits_SV.shape[0]:
            raise IndexError("a mask for a row that is not there")
        native.lib.bny_mask(
            words.ctypes.data, words.shape[1], own.ctypes.data, len(own), logits_SV.data_ptr(), logits_SV.stride(0), vocab_size
        )
        return
    for row, allowed in zip(rows.tolist(), bits, strict=True):
        if not (allowed == -1).all():
            bias = np.take(_BIAS, allowed.view(np.uint8), axis=0).reshape(-1)[:vocab_size]
            logits_SV[row].add_(torch.from_numpy(bias))
