"""StepInput (host arrays) -> ForwardBatch (tensors), on the forward thread."""

from __future__ import annotations

import numpy as np
import torch

from ..layers.forward_batch import ForwardBatch
from ..layers.sampler import draw_params
from .device import Device
from .future_map import FutureMap
from .step import StepInput
from .table_mirror import TableMirror

Extras = tuple[torch.Tensor, torch.Tensor | None]  # rows that sample, int64 [S]; parameters of their draws for a kernel, or None


class BatchBuilder:
    """Builds the batches of one runner. The table is read when a step is built: on CPU in place, else its changed cells are copied.

    All arrays of a step cross to the device in one copy.
    """

    def __init__(self, device: Device, req_to_token: np.ndarray, future_map: FutureMap, *, kernel_draws: bool = False) -> None:
        self._device = device
        self._future_map = future_map
        self._kernel_draws = kernel_draws
        self._on_cpu = device.device.type == "cpu"
        self.table = torch.from_numpy(req_to_token)
        if not self._on_cpu:
            self.table = torch.zeros(req_to_token.shape, dtype=torch.int32, device=device.device)
        self._mirror = None if self._on_cpu else TableMirror(req_to_token)

    def build(self, step: StepInput) -> tuple[ForwardBatch, Extras]:
        """The batch, and what sampling needs besides."""
        seq_lens, extend_lens = step.seq_lens.astype(np.int64), step.extend_lens.astype(np.int64)
        prefix_lens = seq_lens - extend_lens
        ends = np.cumsum(extend_lens)
        positions = np.arange(len(step.input_ids)) + np.repeat(seq_lens - ends, extend_lens)
        rows = step.rows.astype(np.int64)
        arrays = [step.input_ids.astype(np.int64), positions, rows, seq_lens, extend_lens, prefix_lens]
        arrays += [step.out_cache_loc.astype(np.int64), ends[step.sample_index] - 1, rows[step.sample_index]]
        if self._kernel_draws:
            arrays.append(draw_params(step.sampling))
        num_batch = len(arrays)
        if self._mirror is not None:
            arrays += self._mirror.changes(step)
        tensors = self._device.upload_all(arrays)
        if self._mirror is not None:
            cells, slots = tensors[num_batch:]
            self.table.view(-1).index_copy_(0, cells, slots)
        input_ids = tensors[0]
        if (step.input_ids < 0).any():
            input_ids = self._future_map.resolve(input_ids)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=tensors[1],
            rows=tensors[2],
            seq_lens=tensors[3],
            extend_lens=tensors[4],
            prefix_lens=tensors[5],
            out_cache_loc=tensors[6],
            req_to_token=self.table,
            sample_tokens=tensors[7],
            seq_lens_host=seq_lens,
            extend_lens_host=extend_lens,
            prefix_lens_host=prefix_lens,
            embeds=step.embeds,
        )
        return batch, (tensors[8], tensors[9] if self._kernel_draws else None)
