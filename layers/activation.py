"""Gated activations over a merged gate-up projection."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .kernels.ops import current_ops

_OPERATIONS = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function [T, 2 I] -> [T, I] of torch's default device: act(first half) * second half. Names are those of a config's
    hidden_act. Raises ValueError for an unknown one."""
    if name not in _OPERATIONS:
        raise ValueError(f"unknown activation {name!r}; known are {', '.join(_OPERATIONS)}")
    found: Callable[[torch.Tensor], torch.Tensor] = getattr(current_ops(), _OPERATIONS[name])
    return found
