"""What the ranks of one model say to each other during a step. With weight_group.py the only file that knows torch.distributed.

Groups are objects of their own, not torch's global ones: gloo on CPU, NCCL on CUDA, and gloo for what concerns the host. At size 1
every call hands back what it was given.

Legend: N rows, V vocabulary, T tokens, H hidden size.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _distributed

from .rank_spec import SINGLE, RankSpec

LOOPBACK = "127.0.0.1"
dist: Any = _distributed  # half of it has no types


class RankLostError(RuntimeError):
    """Another rank is gone, or does not answer in time, so that no further step can be computed."""


class Group:
    """Ranks that compute each layer together. All of them make the same calls in the same order."""

    def __init__(self, pg: Any, rank: int, size: int, *, widen: bool) -> None:
        """widen: sum halves as float32."""
        self.rank, self.size = rank, size
        self._pg = pg
        self._widen = widen

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, the same bits on each. x may be overwritten."""
        if self.size == 1:
            return x
        wide = x.float() if self._widen else x.contiguous()
        _wait(self._pg.allreduce([wide]))
        return wide.to(x.dtype)

    def gather_columns(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The x [N, sizes[rank]] of all ranks side by side, [N, sum(sizes)], on each rank."""
        if self.size == 1:
            return x
        width = max(sizes)
        own = x.new_zeros(x.shape[0], width)
        own[:, : x.shape[1]] = x
        parts = [torch.empty_like(own) for _ in sizes]
        _wait(self._pg.allgather([parts], [own]))
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The x of the first rank, on each. x may be overwritten."""
        if self.size > 1:
            _wait(self._pg.broadcast([x], _root(dist.BroadcastOptions())))
        return x


ONE = Group(None, 0, 1, widen=False)


class Receipt:
    """Tensors that are on their way here."""

    def __init__(self, works: list[Any], tensors: list[torch.Tensor]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> list[torch.Tensor]:
        """Block until all are here. Raises RankLostError."""
        for work in self._works:
            _wait(work)
        return self._tensors


class Ranks:
    """A rank's ties to the others: ``tp``, the neighbouring stages, and the way of results from the last stage to all."""

    def __init__(self, spec: RankSpec = SINGLE, device: torch.device | None = None) -> None:
        """Meet the other ranks. Raises RankLostError if they do not come in time."""
        self.spec = spec
        self.tp = ONE
        self._sent: deque[Any] = deque()
        self._host: Any = None
        if spec.world_size == 1:
            return
        device = device or torch.device("cpu")
        try:
            store = _store(spec)
            self._host = _gloo(store, "host", spec.rank, spec)
            self._pipe = self._host if device.type == "cpu" else _nccl(store, "pipe", spec.rank, spec.world_size, spec)
            if spec.tp_size > 1:
                self.tp = _tp_group(store, spec, device)
        except RuntimeError as error:
            raise RankLostError(f"{spec.name} does not find the others at {spec.init_method}: {_first_line(error)}") from error

    def min_over_all(self, value: int) -> int:
        """The least of every rank's value."""
        if self.spec.world_size == 1:
            return value
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        tensor = torch.tensor([value], dtype=torch.int64)
        _wait(self._host.allreduce([tensor], options))
        return int(tensor.item())

    # --- stages: a rank speaks with the ranks of its own tp_rank

    def send_hidden(self, x_TH: torch.Tensor) -> None:
        """Send to the next stage; does not wait until it takes it."""
        self._post(self._pipe.send([x_TH.contiguous()], self.spec.rank + self.spec.tp_size, 0))

    def receive_hidden(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What the stage before sends next."""
        x_TH = torch.empty(shape, dtype=dtype, device=device)
        _wait(self._pipe.recv([x_TH], self.spec.rank - self.spec.tp_size, 0))
        return x_TH

    def send_result(self, tensors: Sequence[torch.Tensor]) -> None:
        """From tp rank 0 of the last stage to every rank of the stages before."""
        if self.spec.is_last_stage and self.spec.tp_rank == 0:
            for tag, tensor in enumerate(tensors, 1):
                host = tensor.cpu().contiguous()
                if host.numel():
                    for rank in range(self.spec.world_size - self.spec.tp_size):
                        self._post(self._host.send([host], rank, tag))

    def receive_result(self, sizes: Sequence[int]) -> Receipt:
        """Await the next result: int64 [sizes[0]], and as far as there are more sizes float32, int32, float32."""
        dtypes = (torch.int64, torch.float32, torch.int32, torch.float32)
        tensors = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=False)]
        source = self.spec.world_size - self.spec.tp_size
        return Receipt([self._host.recv([t], source, tag) for tag, t in enumerate(tensors, 1) if t.numel()], tensors)

    def _post(self, work: Any) -> None:
        """Keep what is being sent alive, and do not run ahead of who receives it."""
        self._sent.append(work)
        while len(self._sent) > 8 * self.spec.world_size:
            _wait(self._sent.popleft())

    def close(self) -> None:
        """Leave the others. Idempotent."""
        self._sent.clear()
        self._host = self._pipe = None
        self.tp = ONE


def _store(spec: RankSpec) -> Any:
    scheme, _, place = spec.init_method.partition("://")
    timeout = timedelta(seconds=spec.timeout)
    if scheme == "file":
        store: Any = dist.FileStore(place, spec.world_size)
        store.set_timeout(timeout)
        return store
    host, _, port = place.rpartition(":")
    return dist.TCPStore(host.strip("[]"), int(port), spec.world_size, spec.rank == 0, timeout, wait_for_workers=False)


def _tp_group(store: Any, spec: RankSpec, device: torch.device) -> Group:
    name = f"tp{spec.pp_rank}"
    if device.type == "cpu":
        return Group(_gloo(store, name, spec.tp_rank, spec, size=spec.tp_size), spec.tp_rank, spec.tp_size, widen=True)
    return Group(_nccl(store, name, spec.tp_rank, spec.tp_size, spec), spec.tp_rank, spec.tp_size, widen=False)


def _gloo(store: Any, name: str, rank: int, spec: RankSpec, *, size: int | None = None) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address(spec.init_method))]
    options._timeout = timedelta(seconds=spec.timeout)
    return gloo(dist.PrefixStore(name, store), rank, spec.world_size if size is None else size, options)


def _nccl(store: Any, name: str, rank: int, size: int, spec: RankSpec) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=spec.timeout)
    return nccl(dist.PrefixStore(name, store), rank, size, options)


def own_address(init_method: str) -> str:
    """The address of this machine that the others reach: that of the interface which leads to rank 0."""
    scheme, _, place = init_method.partition("://")
    if scheme == "file":
        return LOOPBACK
    host, _, port = place.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _root(options: Any) -> Any:
    options.rootRank = 0
    return options


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RankLostError(f"another rank is lost: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].split(". This is typically", 1)[0]
