"""The head: hidden states to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def compute_logits(hidden: torch.Tensor, head: torch.Tensor, *, soft_cap: float | None = None) -> torch.Tensor:
    """float32 [N, V] of any N positions. hidden is [N, hidden], head [V, hidden]."""
    logits = F.linear(hidden, head)
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits.float()
