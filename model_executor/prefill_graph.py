"""Recorded prompts, in pieces: what lies between two layers' attention is recorded for numbers of tokens, attention is not, since
how its kernels are launched follows from the lengths of a step.

A step is padded to the next recorded number of tokens. A piece leaves q, k and v in buffers that all layers share; attention reads
those of the step's own tokens and leaves its result in another, which the next piece reads. Padding tokens compute something that
nobody reads: rows of a step meet in attention only.

Legend: T tokens of a step, N tokens of a recording, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from ..layers.attention.attention import Attention, bind_attention
from ..layers.attention.base import AttentionBackend, AttentionSpec
from ..layers.forward_batch import ForwardBatch

HiddenStates = Callable[[ForwardBatch], torch.Tensor]
DEFAULT_MAX_TOKENS = 2048  # of a recorded step: beyond, kernels take longer than their launches
_STEPS = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))  # first, last, distance
_LAST_STEP = 512


class PieceRecorder(Protocol):
    """Records what is done on the device between two calls."""

    def begin(self) -> None:
        """From here on nothing is computed, all is recorded."""

    def end(self) -> Callable[[], None]:
        """What computes it."""


class _Places(NamedTuple):
    """Buffers of layers of one shape."""

    q: torch.Tensor  # [most, H, D]
    k: torch.Tensor  # [most, K, D]
    v: torch.Tensor
    out: torch.Tensor  # [most, H, D]


@dataclass(slots=True)
class _Recording:
    pieces: list[tuple[Callable[[], None], AttentionSpec]]  # each with the attention behind it
    last: Callable[[], None]
    hidden: torch.Tensor


class _Splitter:
    """Stands for the backend while pieces are recorded: ends one at each attention and begins the next."""

    def __init__(self, places: dict[tuple[int, int, int], _Places]) -> None:
        self._places = places
        self.recorder: PieceRecorder | None = None  # None: nothing is recorded
        self.pieces: list[tuple[Callable[[], None], AttentionSpec]] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing."""

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        places, num = self._places[_shape(layer)], q_THD.shape[0]
        for place, x in zip(places, (q_THD, k_TKD, v_TKD), strict=False):
            place[:num].copy_(x)
        if self.recorder is not None:
            self.pieces.append((self.recorder.end(), layer))
            self.recorder.begin()
        return places.out[:num]


class PrefillGraphs:
    """Recordings of a model's steps by their number of tokens, from the largest down."""

    def __init__(
        self,
        model: nn.Module,
        forward: HiddenStates,
        backend: AttentionBackend,
        *,
        sizes: Sequence[int],
        recorder: PieceRecorder,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """forward: of the model, whose attention is bound to the backend and stays so. dtype: of activations."""
        self.sizes = sorted(sizes)
        self._backend = backend
        most = self.sizes[-1]
        self._inputs = torch.zeros((2, most), dtype=torch.int64, device=device)  # ids and positions
        layers = [module.spec for module in model.modules() if isinstance(module, Attention)]
        self._places = {_shape(layer): _make_places(layer, most, dtype, device) for layer in layers}
        self._recordings: dict[int, _Recording] = {}
        splitter, start = _Splitter(self._places), time.perf_counter()
        bind_attention(model, splitter)
        try:
            for size in reversed(self.sizes):
                self._recordings[size] = self._record(forward, splitter, size, recorder)
        finally:
            bind_attention(model, backend)
        self.seconds = time.perf_counter() - start

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Hidden states [T, hidden] of any step, valid until the next; None for one with more tokens than are recorded."""
        num = len(batch.input_ids)
        if num == 0 or num > self.sizes[-1]:
            return None
        recording = self._recordings[self.sizes[bisect.bisect_left(self.sizes, num)]]
        self._inputs[:, :num].copy_(torch.stack([batch.input_ids, batch.positions]))  # beyond: those of some step before
        self._backend.plan(batch)
        for piece, layer in recording.pieces:
            piece()
            q, k, v, out = (place[:num] for place in self._places[_shape(layer)])
            out.copy_(self._backend.forward(q, k, v, layer, batch))
        recording.last()
        return recording.hidden[:num]

    def _record(self, forward: HiddenStates, splitter: _Splitter, size: int, recorder: PieceRecorder) -> _Recording:
        batch = self._batch(size)
        forward(batch)  # compiles kernels, and allocates what is allocated once
        splitter.recorder, splitter.pieces = recorder, []
        recorder.begin()
        hidden = forward(batch)
        last = recorder.end()
        splitter.recorder = None
        return _Recording(splitter.pieces, last, hidden)

    def _batch(self, size: int) -> ForwardBatch:
        """What layers read of a step outside of attention: ids and positions."""
        ids, positions = self._inputs[:, :size]
        none, none_host = ids[:0], np.zeros(0, np.int64)
        return ForwardBatch(
            input_ids=ids,
            positions=positions,
            rows=none,
            seq_lens=none,
            extend_lens=none,
            prefix_lens=none,
            out_cache_loc=none,
            req_to_token=none,
            sample_tokens=none,
            seq_lens_host=none_host,
            extend_lens_host=none_host,
            prefix_lens_host=none_host,
        )


def prefill_sizes(max_tokens: int) -> list[int]:
    """4 to 32 by 4, to 256 by 16, to 512 by 32, to 1024 by 64, to 4096 by 256, then by 512, up to max_tokens, its last."""
    sizes = [size for first, last, distance in _STEPS for size in range(first, last + 1, distance)]
    sizes += range(_STEPS[-1][1] + _LAST_STEP, max_tokens, _LAST_STEP)
    return sorted({size for size in sizes if size < max_tokens} | {max_tokens})


def _shape(layer: AttentionSpec) -> tuple[int, int, int]:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim


def _make_places(layer: AttentionSpec, most: int, dtype: torch.dtype, device: torch.device) -> _Places:
    heads, kv_heads, dim = _shape(layer)
    return _Places(*(torch.zeros((most, num, dim), dtype=dtype, device=device) for num in (heads, kv_heads, kv_heads, heads)))
