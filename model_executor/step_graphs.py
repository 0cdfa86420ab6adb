"""The recordings of a runner: decode steps whole, steps with prompts in pieces."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

import torch
from torch import nn

from ..layers.attention.base import AttentionBackend, RecordableBackend
from ..layers.forward_batch import ForwardBatch
from .cuda_graph import CudaRecorder, DecodeGraphs, HiddenStates, Recorder
from .prefill_graph import PieceRecorder, PrefillGraphs

logger = logging.getLogger(__name__)
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Either may be missing."""

    decode: DecodeGraphs | None
    prefill: PrefillGraphs | None

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Hidden states [T, hidden] of a step, valid until the next; None for one that is not recorded."""
        if self.decode is not None and (hidden := self.decode.run(batch)) is not None:
            return hidden
        return None if self.prefill is None else self.prefill.run(batch)


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """What to record: numbers of requests of decode steps, numbers of tokens of others, dtype of activations."""

    decode_sizes: tuple[int, ...]
    prefill_sizes: tuple[int, ...]
    dtype: torch.dtype


class AnyRecorder(Recorder, PieceRecorder):
    """Records steps and pieces."""


def record_steps(
    model: nn.Module,
    forward: HiddenStates,
    backend: AttentionBackend,
    table: torch.Tensor,
    *,
    plan: GraphPlan,
    recorder: AnyRecorder | CudaRecorder | None = None,
) -> StepGraphs | None:
    """Record what is planned, on the current CUDA stream unless a recorder is given; None for nothing. What it takes is logged."""
    can_decode = isinstance(backend, RecordableBackend) and bool(plan.decode_sizes)
    if not can_decode and not plan.prefill_sizes:
        return None
    device = table.device
    if device.type == "cuda":  # no graph of old may be freed, and no event waited for, while one is recorded
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
    before = _free(device)
    recorder = recorder or CudaRecorder(torch.cuda.current_stream(device))
    prefill = decode = None
    if plan.prefill_sizes:  # first: they take the most memory, in which the others then find theirs
        prefill = PrefillGraphs(
            model, forward, backend, sizes=plan.prefill_sizes, recorder=recorder, dtype=plan.dtype, device=device
        )
    if can_decode and isinstance(backend, RecordableBackend):
        decode = DecodeGraphs(forward, backend, table, sizes=plan.decode_sizes, recorder=recorder)
    for name, graphs in (("decode steps", decode), ("steps with prompts", prefill)):
        if graphs is not None:
            logger.info("recorded %s of %d sizes up to %d in %.1f s", name, len(graphs.sizes), graphs.sizes[-1], graphs.seconds)
    logger.info("recordings take %.2f GiB", (before - _free(device)) / GIB)
    return StepGraphs(decode, prefill)


def _free(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
