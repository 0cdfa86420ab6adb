"""LateMask: which tokens the rows of a step may sample, told maybe after the step was launched. Imports no torch."""

from __future__ import annotations

import threading

import numpy as np


class LateMask:
    """The step computes in the meantime and waits for the mask only when it samples.

    rows: int32 [C], ascending indices into the S rows that sample; the others are free. The mask is int32 [C, ceil(V / 32)]: bit
    i % 32 of word i // 32 says whether token i is allowed. Whoever launches a step with a LateMask must fill it, whatever happens.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._bits: np.ndarray | None = None
        self._filled = threading.Event()

    def fill(self, bits: np.ndarray) -> None:
        """Say what is allowed. The array belongs to the step from here on."""
        self._bits = bits
        self._filled.set()

    def wait(self) -> np.ndarray:
        """The mask, as soon as it is filled."""
        self._filled.wait()
        if self._bits is None:
            raise RuntimeError("a mask without bits")
        return self._bits

    def allowed(self, vocab_size: int) -> np.ndarray:
        """bool [C, vocab_size]."""
        return np.unpackbits(self.wait().view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
