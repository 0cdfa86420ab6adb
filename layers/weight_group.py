"""A group of processes over which a trainer hands weights to the ranks that serve them: the trainer is rank 0 and broadcasts.

It is met as torch's own groups are (a store at the trainer's address, prefixed by the group's name, then torch's helper), which is
what trainers written for SGLang do on their side. ``WeightGroup`` works on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _distributed
from torch.distributed import distributed_c10d as _c10d

BACKENDS = ("gloo", "nccl")
dist: Any = _distributed  # half of it has no types
c10d: Any = _c10d


class WeightGroup:
    """One member. All members make the same broadcasts in the same order."""

    def __init__(
        self, name: str, *, address: str, port: int, rank: int, world_size: int, backend: str = "gloo", timeout: float = 60.0
    ) -> None:
        """Meet the others. Raises RuntimeError if they do not come within ``timeout`` seconds."""
        self._limit = timedelta(seconds=timeout)
        host = f"[{address}]" if ":" in address else address
        store, rank, world_size = next(dist.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=self._limit))
        store.set_timeout(self._limit)
        prefixed = dist.PrefixStore(name, store)
        self._pg, _ = c10d._new_process_group_helper(
            world_size, rank, [], dist.Backend(backend), prefixed, group_name=name, timeout=self._limit
        )
        c10d._world.pg_group_ranks[self._pg] = {
            index: index for index in range(world_size)
        }  # which the helper leaves to its caller
        self._on_cpu = backend == "gloo"

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send (rank 0) or receive a tensor in place. Raises RuntimeError when the others do not answer in time."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._limit
        self._pg.broadcast([tensor], options).wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The next tensor, on the host."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu" if self._on_cpu else device)
        self.broadcast(tensor)
        return tensor.cpu()

    def close(self) -> None:
        """Leave. The group cannot be used any more."""
        dist.destroy_process_group(self._pg)
