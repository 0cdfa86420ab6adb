"""Deterministic inference: what a runner must be made of so that the bits of a result depend on its request alone.

A request's tokens go through products of rows with weights, through attention, and through operations on single rows. The products
and attention choose how they sum up by shape, so those are replaced; what torch does row by row stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch
from torch import nn

from ..layers.embedding import Embedding
from ..layers.invariant import InvariantProducts, check_invariance
from ..layers.kernels.cpu.library import Native, native_kernels
from ..layers.linear import Linear
from .step import RunnerConfig

T = TypeVar("T")
BACKENDS = ("cpu", "torch_invariant")  # attention whose order of summing follows from a query's position


def determined(config: RunnerConfig) -> RunnerConfig:
    """The config with the attention backend that deterministic inference needs, if it is asked for.

    Raises ValueError for a device, a backend or a division of the model with which it cannot be had.
    """
    if not config.enable_deterministic_inference:
        return config
    name = config.attention_backend
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        raise ValueError("deterministic inference is there for device cpu only")
    if name is not None and name not in BACKENDS:
        raise ValueError(f"deterministic inference: attention backend {name} is not among {', '.join(BACKENDS)}")
    if config.ranks.world_size > 1:
        raise ValueError("deterministic inference needs the whole model in one process")
    best = "cpu" if isinstance(native_kernels(), Native) else "torch_invariant"
    return msgspec.structs.replace(config, attention_backend=name or best)


def check_model(config: RunnerConfig, model: nn.Module) -> None:
    """Raises ValueError if its products are not invariant on this machine although they must be."""
    if config.enable_deterministic_inference:
        with torch.inference_mode():
            check_invariance(
                module.weight for module in model.modules() if isinstance(module, Linear | Embedding) and module.packed is None
            )


def in_mode(config: RunnerConfig, compute: Callable[[], T]) -> T:
    """What ``compute`` returns, computed as the config asks."""
    if not config.enable_deterministic_inference:
        return compute()
    with InvariantProducts():
        return compute()
