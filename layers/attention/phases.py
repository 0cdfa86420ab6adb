"""One backend for prompts and another for decode, over the same pool."""

from __future__ import annotations

import torch

from ..forward_batch import ForwardBatch
from .base import AttentionBackend, AttentionSpec, RecordableBackend


class PhaseBackend:
    """AttentionBackend that hands steps of one token per request to ``decode`` and all others to ``prefill``."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self._prefill, self.decode = prefill, decode
        self._current = decode

    def plan(self, batch: ForwardBatch) -> None:
        """Choose for this step."""
        self._current = self.decode if int(batch.extend_lens_host.max(initial=1)) == 1 else self._prefill
        self._current.plan(batch)

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        return self._current.forward(q_THD, k_TKD, v_TKD, layer, batch)

    def plan_capture(self, batch: ForwardBatch) -> None:
        """Of decode."""
        self._current = self.decode
        self._recordable().plan_capture(batch)

    def plan_replay(self, batch: ForwardBatch) -> None:
        """Of decode."""
        self._current = self.decode
        self._recordable().plan_replay(batch)

    def _recordable(self) -> RecordableBackend:
        if not isinstance(self.decode, RecordableBackend):
            raise TypeError(f"{type(self.decode).__name__} cannot be recorded")
        return self.decode


def is_recordable(backend: AttentionBackend) -> bool:
    """Whether decode steps of the backend can be recorded."""
    return isinstance(backend.decode if isinstance(backend, PhaseBackend) else backend, RecordableBackend)
