"""Recorded decode steps: the kernels of a step are launched by one call, over tensors whose contents change.

A batch is padded to the next recorded size. A padding row is row 0 with one token in slot 0, the scratch slot, so it reads and
writes nothing that anyone owns. Prompts are recorded in pieces: prefill_graph.py.

Legend: B requests of a step, N requests of a recording.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..layers.attention.base import RecordableBackend
from ..layers.forward_batch import ForwardBatch

HiddenStates = Callable[[ForwardBatch], torch.Tensor]
IDS, POSITIONS, ROWS, LENS, SLOTS = range(5)  # rows of the recorded tensor
WARM_UPS = 2  # eager steps before a recording: they compile kernels and allocate what is allocated once


class Recorder(Protocol):
    """Records what a call does on the device."""

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """(replay, the tensor that the call returned and that every replay fills again)."""


class CudaRecorder:
    """CUDA graphs that share one memory pool: their steps run one after the other."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """As Recorder.record. Other threads may go on using the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = call()
        return graph.replay, output

    def begin(self) -> None:
        """As PieceRecorder.begin, on the stream, which is the current one."""
        self._piece = torch.cuda.CUDAGraph()
        self._piece.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        """As PieceRecorder.end."""
        self._piece.capture_end()
        return self._piece.replay


@dataclass(slots=True)
class _Recording:
    batch: ForwardBatch
    replay: Callable[[], None]
    hidden: torch.Tensor


class DecodeGraphs:
    """Recordings of decode steps, from the largest size down, so that the smaller ones find their memory in its pool."""

    def __init__(
        self, forward: HiddenStates, backend: RecordableBackend, table: torch.Tensor, *, sizes: Sequence[int], recorder: Recorder
    ) -> None:
        self.sizes = sorted(sizes)
        self._backend = backend
        most, device = self.sizes[-1], table.device
        self._inputs = torch.zeros((5, most), dtype=torch.int64, device=device)
        self._inputs[LENS] = 1
        self._padding = self._inputs.clone()
        self._ones = torch.ones(most, dtype=torch.int64, device=device)
        self._order = torch.arange(most, device=device)
        self._recordings: dict[int, _Recording] = {}
        start = time.perf_counter()
        for size in reversed(self.sizes):
            self._recordings[size] = self._record(forward, table, size, recorder)
        self.seconds = time.perf_counter() - start

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Hidden states [B, hidden] of a decode step, valid until the next; None for a step that is not recorded."""
        num = len(batch.rows)
        if num == 0 or num > self.sizes[-1] or int(batch.extend_lens_host.max()) > 1:
            return None
        size = self.sizes[bisect.bisect_left(self.sizes, num)]
        recording = self._recordings[size]
        if num < size:
            self._inputs[:, num:size].copy_(self._padding[:, num:size])
        parts = [batch.input_ids, batch.positions, batch.rows, batch.seq_lens, batch.out_cache_loc]
        self._inputs[:, :num].copy_(torch.stack(parts))
        recording.batch.seq_lens_host[:num] = batch.seq_lens_host
        recording.batch.seq_lens_host[num:] = 1
        np.subtract(recording.batch.seq_lens_host, 1, out=recording.batch.prefix_lens_host)
        self._backend.plan_replay(recording.batch)
        recording.replay()
        return recording.hidden[:num]

    def _record(self, forward: HiddenStates, table: torch.Tensor, size: int, recorder: Recorder) -> _Recording:
        batch = self._batch(table, size)
        for _ in range(WARM_UPS):
            self._backend.plan(batch)
            forward(batch)
        self._backend.plan_capture(batch)
        replay, hidden = recorder.record(lambda: forward(batch))
        return _Recording(batch, replay, hidden)

    def _batch(self, table: torch.Tensor, size: int) -> ForwardBatch:
        """A batch of padding over the recorded tensors."""
        inputs = self._inputs
        return ForwardBatch(
            input_ids=inputs[IDS, :size],
            positions=inputs[POSITIONS, :size],
            rows=inputs[ROWS, :size],
            seq_lens=inputs[LENS, :size],
            extend_lens=self._ones[:size],
            prefix_lens=inputs[POSITIONS, :size],  # of a decode step they are its positions
            out_cache_loc=inputs[SLOTS, :size],
            req_to_token=table,
            sample_tokens=self._order[:size],
            seq_lens_host=np.ones(size, np.int64),
            extend_lens_host=np.ones(size, np.int64),
            prefix_lens_host=np.zeros(size, np.int64),
        )


def capture_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then by 8 from 16 (12 between), by 16 from 272, by 32 from 512, up to max_batch, which is always one of them."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max(513, max_batch + 1), 32)]
    return sorted({size for size in sizes if size < max_batch} | {max_batch})


def parse_sizes(text: str) -> list[int]:
    """Of ``--cuda-graph-bs``: numbers with commas between. Raises ValueError."""
    sizes = [int(part) for part in text.split(",") if part.strip().isdecimal() and int(part) > 0]
    if len(sizes) != text.count(",") + 1:
        raise ValueError(f"cuda_graph_bs must be positive numbers with commas between, not {text!r}")
    return sorted(set(sizes))
