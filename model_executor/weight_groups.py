"""The groups over which trainers hand weights to one rank, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..layers.weight_group import BACKENDS, WeightGroup
from .step import GroupSpec, RankSpec, TensorSpec
from .weight_sources import OVERLAY

_NAMES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
RECEIVED: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


class WeightGroups:
    """``join`` may be called on any thread, the others between two steps. Every failure is a ValueError or a RuntimeError."""

    def __init__(self, ranks: RankSpec) -> None:
        self._ranks = ranks
        self._groups: dict[str, WeightGroup] = {}

    def join(self, spec: GroupSpec) -> None:
        """Meet the trainer and the other ranks."""
        if spec.name in self._groups:
            raise ValueError(f"the group {spec.name!r} exists already")
        if spec.backend not in BACKENDS:
            raise ValueError(f"unknown backend {spec.backend!r}; known are {', '.join(BACKENDS)}")
        if spec.backend == "nccl" and not torch.cuda.is_available():
            raise ValueError("the backend nccl needs a GPU; use gloo")
        rank = spec.rank_offset + self._ranks.overall_rank
        if not 0 < rank < spec.world_size:
            raise ValueError(
                f"rank {rank} (rank_offset + {self._ranks.overall_rank}) must be in [1, {spec.world_size}); rank 0 is the trainer's"
            )
        self._groups[spec.name] = WeightGroup(
            spec.name,
            address=spec.address,
            port=spec.port,
            rank=rank,
            world_size=spec.world_size,
            backend=spec.backend,
            timeout=spec.timeout,
        )

    def leave(self, name: str) -> None:
        """Forget a group."""
        self._take(name).close()

    def receive(self, name: str, tensors: Sequence[TensorSpec], folder: str, device: torch.device) -> str:
        """Receive these tensors and lay them down as an overlay for this rank; its folder. A group that fails is left."""
        group = self._take(name)
        try:
            received = {each.name: group.receive(each.shape, dtype_of(each.dtype), device) for each in tensors}
        except BaseException:
            with contextlib.suppress(RuntimeError, ValueError):
                group.close()
            raise
        self._groups[name] = group
        own = Path(folder) / f"rank{self._ranks.overall_rank}"
        own.mkdir(parents=True, exist_ok=True)
        save_file(received, own / OVERLAY)
        return str(own)

    def _take(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise ValueError(f"there is no group {name!r}; /init_weights_update_group makes one")
        return self._groups.pop(name)


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of a name like "bfloat16" or "torch.bfloat16". Raises ValueError."""
    dtype = RECEIVED.get(name.removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"unknown dtype {name[:50]!r}; known are {', '.join(RECEIVED)}")
    return dtype
