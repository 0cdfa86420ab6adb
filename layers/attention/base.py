"""The seam that every attention backend implements.

Legend: T tokens of the step, H query heads, K heads of keys and values, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend must know of one layer."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None  # positions that a query sees, its own included
    soft_cap: float | None = None  # scores s become cap * tanh(s / cap)


class AttentionBackend(Protocol):
    """Writes the KV of a step to the pool and attends to it. Calls come in the order plan, then forward for each layer."""

    def plan(self, batch: ForwardBatch) -> None:
        """Derive from the batch whatever all layers share. Once a step."""

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write k and v to batch.out_cache_loc, then let each token attend to itself and to what precedes it in its request.

        Returns [T, H, D]. Modifies none of its arguments.
        """


@runtime_checkable
class RecordableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be recorded (a CUDA graph) and replayed over the same tensors with other contents."""

    def plan_capture(self, batch: ForwardBatch) -> None:
        """Instead of plan, right before a decode step over ``batch`` is recorded. Requests of any length may be replayed later. The
        step has run once with ``plan`` before."""

    def plan_replay(self, batch: ForwardBatch) -> None:
        """Before each replay: the tensors of ``batch`` are the recorded ones, its host arrays hold the lengths of this step."""
