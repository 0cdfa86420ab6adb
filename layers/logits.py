"""The head: hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable

import torch


def compute_logits(
    hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], *, soft_cap: float | None = None
) -> torch.Tensor:
    """float32 [N, V] of any N positions. hidden is [N, hidden], head projects it to [N, V]."""
    logits = head(hidden)
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits.float()
