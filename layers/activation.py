"""Gated activations over a merged gate-up projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function [T, 2 I] -> [T, I]: act(first half) * second half. Names are those of a config's hidden_act."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known are {', '.join(_ACTIVATIONS)}")
    act = _ACTIVATIONS[name]

    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate).mul_(up)

    return apply
