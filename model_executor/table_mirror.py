"""Keeps a copy of req_to_token on a device: which cells a step must bring along."""

from __future__ import annotations

import numpy as np

from .step import StepInput


class TableMirror:
    """Knows what the copy holds. A step brings its own tokens' cells, and whatever else changed in the rows that it computes."""

    def __init__(self, table: np.ndarray) -> None:
        """table: int32 [rows + 1, width] of the host. The copy starts as zeros."""
        self._table = table
        self._sent = np.zeros_like(table)
        self._seen = np.full(table.shape[0], -1, np.int64)

    def changes(self, step: StepInput) -> list[np.ndarray]:
        """Flat indices int64 and values int32 of the cells that the copy must take before the step.

        Earlier cells of a row are compared only if step.rewrites says that the row was written to since the step that saw it last:
        a decode step costs as much as it has requests, however long they are.
        """
        rows, extend_lens = step.rows.astype(np.int64), step.extend_lens
        prefix_lens = step.seq_lens - extend_lens
        starts = np.cumsum(extend_lens) - extend_lens
        own_rows = np.repeat(rows, extend_lens)
        own_columns = np.arange(len(own_rows)) + np.repeat(prefix_lens - starts, extend_lens)
        self._sent[own_rows, own_columns] = step.out_cache_loc
        cells, values = [own_rows * self._table.shape[1] + own_columns], [step.out_cache_loc.astype(np.int32)]
        for row, length in self._rewritten(step, rows, prefix_lens):
            host, sent = self._table[row, :length], self._sent[row, :length]
            at = np.flatnonzero(host != sent)
            cells.append(row * self._table.shape[1] + at)
            values.append(host[at])
            sent[at] = host[at]
        return [np.concatenate(cells), np.concatenate(values)]

    def _rewritten(self, step: StepInput, rows: np.ndarray, prefix_lens: np.ndarray) -> list[tuple[int, int]]:
        """(row, tokens before the step's own) of the rows whose earlier cells may have changed."""
        changed = prefix_lens > 0
        if step.rewrites is not None:
            changed &= step.rewrites[rows] != self._seen[rows]
            self._seen[rows] = step.rewrites[rows]
        return list(zip(rows[changed].tolist(), prefix_lens[changed].tolist(), strict=True))
