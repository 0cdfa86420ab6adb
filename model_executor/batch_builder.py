"""StepInput (host arrays) -> ForwardBatch (tensors), on the forward thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..layers.forward_batch import ForwardBatch
from .device import Device
from .future_map import FutureMap
from .step import StepInput


class BatchBuilder:
    """Builds the batches of one runner. The table is read when a step is built: on CPU in place, else its rows are copied."""

    def __init__(self, device: Device, req_to_token: np.ndarray, future_map: FutureMap) -> None:
        self._device = device
        self._host_table = req_to_token
        self._future_map = future_map
        self._on_cpu = device.device.type == "cpu"
        self._table = torch.from_numpy(req_to_token)
        if not self._on_cpu:
            self._table = torch.zeros(req_to_token.shape, dtype=torch.int32, device=device.device)

    def build(self, step: StepInput) -> ForwardBatch:
        upload: Callable[[np.ndarray], torch.Tensor] = self._device.upload
        seq_lens, extend_lens = step.seq_lens.astype(np.int64), step.extend_lens.astype(np.int64)
        prefix_lens = seq_lens - extend_lens
        ends = np.cumsum(extend_lens)
        positions = np.arange(len(step.input_ids)) + np.repeat(seq_lens - ends, extend_lens)
        input_ids = upload(step.input_ids.astype(np.int64))
        if (step.input_ids < 0).any():
            input_ids = self._future_map.resolve(input_ids)
        if not self._on_cpu:
            self._copy_rows(step.rows, int(seq_lens.max(initial=0)))
        return ForwardBatch(
            input_ids=input_ids,
            positions=upload(positions),
            rows=upload(step.rows.astype(np.int64)),
            seq_lens=upload(seq_lens),
            extend_lens=upload(extend_lens),
            prefix_lens=upload(prefix_lens),
            out_cache_loc=upload(step.out_cache_loc.astype(np.int64)),
            req_to_token=self._table,
            sample_tokens=upload(ends[step.sample_index] - 1),
            seq_lens_host=seq_lens,
            extend_lens_host=extend_lens,
            prefix_lens_host=prefix_lens,
        )

    def _copy_rows(self, rows: np.ndarray, width: int) -> None:
        """The cells of the step's rows in one copy. Whole prefixes: the cache may have replaced slots of earlier tokens."""
        cells = self._device.upload(self._host_table[rows, :width])
        self._table[self._device.upload(rows.astype(np.int64)), :width] = cells
