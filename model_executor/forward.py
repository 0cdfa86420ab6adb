"""How this start attends, stores KV and computes layers: each choice with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..layers.attention.base import AttentionBackend
from ..layers.attention.cpu import CpuBackend
from ..layers.attention.registry import attention_backend
from ..layers.forward_batch import ForwardBatch
from ..layers.kernels.cpu.library import Native, NotNative
from ..layers.kernels.ops import Draw
from ..mem_cache.kv_pool import KVPool
from .cpu_graph import CpuGraph, why_not
from .dtype import DTYPES
from .model_config import ModelConfig
from .models.blocks import DecoderModel
from .step import RunnerConfig

HiddenStates = Callable[[ForwardBatch], torch.Tensor]  # of a step that the backend has planned: [T, hidden]
KV_DTYPES = {name: DTYPES[name] for name in ("float32", "bfloat16")} | {"int8": torch.int8}
_ANY_KV = ("cpu", "torch_native")  # backends that read what KV_DTYPES has, the others read KV in the model's dtype


class AttentionPlan(NamedTuple):
    """A backend and what its pool holds."""

    backend: str
    kv_dtype: torch.dtype
    explain: dict[str, str]
    graph_sizes: tuple[int, ...] = ()  # these three are a GPU's
    draw: Draw | None = None
    prefill_graph_sizes: tuple[int, ...] = ()

    def make_backend(self, pool: KVPool) -> AttentionBackend:
        """The backend over a pool."""
        return attention_backend(self.backend)(pool)


def plan_attention(
    config: RunnerConfig, native: Native | NotNative, *, weights: torch.dtype, compute: torch.dtype
) -> AttentionPlan:
    """native: the kernels of this start, or why there are none. Raises ValueError for an unknown name, or one that does not fit."""
    name, why = config.attention_backend, "as given"
    if name is None:
        name = "cpu" if isinstance(native, Native) else "torch_native"
        why = "the native kernels are there" if isinstance(native, Native) else f"no native kernels: {native.why}"
    attention_backend(name)
    if name == "cpu" and isinstance(native, NotNative):
        raise ValueError(f"attention backend cpu needs the native kernels: {native.why}")
    kv_dtype, kv_why = _kv_dtype(config.kv_cache_dtype, name, weights=weights, compute=compute)
    sampling = "native (the kernels are there)" if isinstance(native, Native) else f"pytorch (no native kernels: {native.why})"
    explain = {
        "attention_backend": f"{name} ({why})",
        "kv_cache_dtype": f"{str(kv_dtype)[6:]} ({kv_why})",
        "sampling_backend": sampling,
    }
    return AttentionPlan(name, kv_dtype, explain)


def _kv_dtype(wanted: str, backend: str, *, weights: torch.dtype, compute: torch.dtype) -> tuple[torch.dtype, str]:
    if wanted == "auto":
        return (weights, "that of the weights") if backend in _ANY_KV else (compute, "that of activations")
    if wanted not in KV_DTYPES:
        raise ValueError(f"unknown kv_cache_dtype {wanted!r}; known are auto, {', '.join(KV_DTYPES)}")
    dtype = KV_DTYPES[wanted]
    if backend not in _ANY_KV and dtype is not compute:
        raise ValueError(f"attention backend {backend} reads KV in {str(compute)[6:]} only, not in {wanted}")
    return dtype, "as given"


def plan_forward(model: DecoderModel, native: Native | NotNative, config: ModelConfig, backend: str) -> tuple[bool, str]:
    """(whether layers run as one native call, why)."""
    if isinstance(native, NotNative):
        return False, f"module by module: no native kernels, {native.why}"
    if backend != "cpu":
        return False, f"module by module: attention backend {backend}"
    obstacle = why_not(model, config.hidden_act)
    return obstacle is None, "one native call a step" if obstacle is None else f"module by module: {obstacle}"


def is_recorded(forward: HiddenStates) -> bool:
    """Whether it replays the CPU graph."""
    return isinstance(getattr(forward, "__self__", None), CpuGraph)


def make_forward(model: DecoderModel, native: Native | NotNative, config: ModelConfig, backend: AttentionBackend) -> HiddenStates:
    """What plan_forward says; the attention modules are bound to the backend."""
    name = "cpu" if isinstance(backend, CpuBackend) else ""
    if isinstance(native, Native) and isinstance(backend, CpuBackend) and plan_forward(model, native, config, name)[0]:
        return CpuGraph(model, backend, native, hidden_act=config.hidden_act).hidden_states
    return model.hidden_states
