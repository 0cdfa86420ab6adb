from __future__ import annotations

import numpy as np
import torch

from banyan.model_executor.batch_builder import changed_cells
from banyan.model_executor.packing import ALIGNMENT, fill, layout, views


def test_arrays_come_back_as_aligned_views():
    arrays = [np.arange(5), np.empty(0, np.int32), np.ones((2, 3), np.float64) * 0.5, np.array([7], np.int32)]
    size, parts = layout(arrays)
    buffer = torch.zeros(size, dtype=torch.uint8)
    fill(buffer.numpy(), arrays, parts)
    found = views(buffer, parts)
    for array, view, part in zip(arrays, found, parts, strict=True):
        assert part.offset % ALIGNMENT == 0
        assert np.array_equal(view.numpy(), array) and view.numpy().dtype == array.dtype
        assert array.size == 0 or view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_only_changed_cells_are_sent_and_the_copy_follows():
    rng = np.random.default_rng(0)
    table, sent = np.zeros((6, 12), np.int32), np.zeros((6, 12), np.int32)
    on_device = np.zeros((6, 12), np.int32)
    for _ in range(50):
        rows = rng.permutation(5)[: rng.integers(1, 5)].astype(np.int32) + 1
        width = int(rng.integers(1, 13))
        for row in rows:
            table[row, rng.integers(0, width)] = rng.integers(1, 99)
        cells, values = changed_cells(table, sent, rows, width)
        on_device.reshape(-1)[cells] = values
        assert np.array_equal(on_device[rows, :width], table[rows, :width])
        assert np.array_equal(on_device, sent)
    assert changed_cells(table, sent, rows, width)[0].size == 0
