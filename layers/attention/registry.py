"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Callable

from ...mem_cache.kv_pool import KVPool
from .base import AttentionBackend

BackendFactory = Callable[[KVPool], AttentionBackend]


def _torch_native(pool: KVPool) -> AttentionBackend:
    from .torch_native import TorchNativeBackend

    return TorchNativeBackend(pool)


def _triton(pool: KVPool) -> AttentionBackend:
    from .triton import TritonBackend

    return TritonBackend(pool)


def _cpu(pool: KVPool) -> AttentionBackend:
    from .cpu import CpuBackend

    return CpuBackend(pool)


def _flashinfer(pool: KVPool) -> AttentionBackend:
    from .flashinfer import FlashInferBackend

    return FlashInferBackend(pool)


def _fa3(pool: KVPool) -> AttentionBackend:
    from .fa3 import FlashAttention3Backend

    return FlashAttention3Backend(pool)


def _torch_invariant(pool: KVPool) -> AttentionBackend:
    from .torch_invariant import TorchInvariantBackend

    return TorchInvariantBackend(pool)


_FACTORIES: dict[str, BackendFactory] = {
    "torch_native": _torch_native,
    "torch_invariant": _torch_invariant,
    "cpu": _cpu,
    "triton": _triton,
    "flashinfer": _flashinfer,
    "fa3": _fa3,
}


def attention_backend(name: str) -> BackendFactory:
    """The factory of the backend ``name``, which imports it when it is called. Raises ValueError for an unknown name."""
    if name not in _FACTORIES:
        raise ValueError(f"unknown attention backend {name!r}; known are {', '.join(_FACTORIES)}")
    return _FACTORIES[name]
