"""Logits of the rows that sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .forward_batch import ForwardBatch


def compute_logits(hidden: torch.Tensor, head: torch.Tensor, batch: ForwardBatch, *, soft_cap: float | None = None) -> torch.Tensor:
    """float32 [S, V]: only the last token of each sampling request meets the head. hidden is [T, hidden], head [V, hidden]."""
    logits = F.linear(hidden.index_select(0, batch.sample_tokens), head)
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits.float()
