from __future__ import annotations

import numpy as np
import torch

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
