"""A row per live request, a cell per token: the cell names the slot that holds the token's K and V."""

from __future__ import annotations

import numpy as np


class ReqToTokenPool:
    """Rows 1..num_rows of ``table`` (int32 [num_rows + 1, width]); row 0 is never handed out.

    Cells of a row beyond what its request wrote hold whatever the row held before. ``rewrites`` (int64 [num_rows + 1]) counts the
    calls of ``write`` for each row; who sets the cell of a row's next token in ``table`` itself need not count it.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        if num_rows < 1 or width < 1:
            raise ValueError(f"a pool needs rows and cells, not {num_rows} x {width}")
        self.table = np.zeros((num_rows + 1, width), dtype=np.int32)
        self.rewrites = np.zeros(num_rows + 1, np.int64)
        self._free = list(range(num_rows, 0, -1))
        self._in_use = [False] * (num_rows + 1)

    @property
    def available(self) -> int:
        """Free rows."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A free row, the last freed first; None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._in_use[row] = True
        return row

    def free(self, row: int) -> None:
        """Give a row back. Raises RuntimeError if it is not in use."""
        if not 0 < row < len(self._in_use) or not self._in_use[row]:
            raise RuntimeError(f"free: row {row} is not in use")
        self._in_use[row] = False
        self._free.append(row)

    def write(self, row: int, start: int, slots: np.ndarray) -> None:
        """Set the cells [start, start + len(slots)) of a row. Raises ValueError beyond the row's end."""
        end = start + len(slots)
        if start < 0 or end > self.table.shape[1]:
            raise ValueError(f"cells [{start}, {end}) are outside a row of {self.table.shape[1]}")
        self.table[row, start:end] = slots
        self.rewrites[row] += 1
