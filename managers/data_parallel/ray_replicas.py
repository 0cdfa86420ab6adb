"""Replicas in a Ray cluster: a placement group for each, an actor for each of its ranks. A replica that is lost, with its node or
without, is placed anew as soon as the cluster has room for it.

Ray places, starts and watches. It unpickles what comes from the cluster in this process and in the actors, which are none that
requests pass through as anything but our own messages.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..config import ControllerConfig, RayOptions, SchedulerConfig, SchedulerInfo
from ..errors import BanyanError, StartError
from ..ipc import IpcNames
from ..ranks.layout import rank_configs
from .ray_rank import RankHost
from .replicas import START_TIMEOUT, Losses, replica_config

logger = logging.getLogger(__name__)

ROOM_TIMEOUT = 300.0  # seconds that a cluster, which may have to grow, gets to make room for the first start
ROOM_POLL = 1.0
REACH_TIMEOUT = 5.0
ROOM_LOG = 10.0
STOP_SLACK = 10.0  # seconds beyond its own that a stop may take


@dataclass(frozen=True)
class Cluster:
    """The cluster that this process is connected to. address: this machine's, as the nodes see it."""

    address: str
    cpus_per_rank: int

    def bundle(self, device: str) -> dict[str, float]:
        """What a rank takes of a node."""
        on_gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) >= 1)
        return {"CPU": float(self.cpus_per_rank)} | ({"GPU": 1.0} if on_gpu else {})


@contextmanager
def connected(options: RayOptions) -> Iterator[Cluster]:
    """Join the cluster of RAY_ADDRESS, or the one that this machine is a node of. Raises StartError."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _reach(address)
        ray.init(address=address, namespace="banyan", logging_level=logging.WARNING)
    except (OSError, ValueError, RayError) as error:
        raise StartError(
            f"--use-ray: no Ray cluster can be reached ({' '.join(str(error).split())[:200]}); start one with `ray start --head`, "
            "or name it in RAY_ADDRESS."
        ) from None
    try:
        yield Cluster(ray.util.get_node_ip_address(), options.cpus_per_rank)
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises OSError if nobody listens at host:port: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT).close()


class Run:
    """One run of a replica. Everything of it ends with ``end``."""

    def __init__(self, cluster: Cluster, bundles: list[dict[str, float]], name: str) -> None:
        self.over = threading.Event()
        self._cluster = cluster
        self._bundles = bundles
        self._name = name
        self._group: PlacementGroup | None = None
        self._hosts: list[Any] = []

    def place(self, deadline: float) -> list[tuple[str, int]]:
        """Wait for room and make the actors; the place of each. Raises StartError."""
        self._group = placement_group(self._bundles, strategy="PACK", name=self._name)
        told = time.monotonic()
        while not self._group.wait(ROOM_POLL):
            if self.over.is_set():
                raise StartError("stopped")
            if time.monotonic() > deadline:
                raise StartError(f"--use-ray: {self._wanted()}")
            if time.monotonic() - told > ROOM_LOG:
                told = float("inf")
                logger.warning("%s; waiting for it", self._wanted())
        actor = ray.remote(RankHost)
        for index, bundle in enumerate(self._bundles):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_concurrency": 4}
            self._hosts.append(actor.options(scheduling_strategy=strategy, **options).remote())
        return list(ray.get([host.place.remote() for host in self._hosts], timeout=START_TIMEOUT))

    def _wanted(self) -> str:
        free = {name: ray.available_resources().get(name, 0) for name in self._bundles[0]}
        return f"the Ray cluster has no room for {self._name}, which wants {self._bundles}; free are {free}"

    def start(self, configs: list[SchedulerConfig]) -> SchedulerInfo:
        """Start the ranks and wait for all. Raises StartError as soon as one fails."""
        pending = [
            host.start.remote(msgspec.json.encode(config), START_TIMEOUT) for host, config in zip(self._hosts, configs, strict=True)
        ]
        first = pending[0]
        while pending:
            done, pending = ray.wait(pending, timeout=ROOM_POLL)
            if self.over.is_set():
                raise StartError("stopped")
            for answer in ray.get(done):
                if "error" in answer:
                    raise StartError(f"{self._name}: {answer['error']}", answer["detail"])
        return msgspec.convert(ray.get(first)["ready"], SchedulerInfo)

    def watch(self, lost: Callable[[str], None]) -> None:
        """Tell once when a rank is over, unless by ``end``. Blocks until then."""
        waits = [host.wait.remote() for host in self._hosts]
        while not self.over.is_set():
            done, _ = ray.wait(waits, timeout=ROOM_POLL)
            if done:
                why = _result(done[0])
                lost(why or "a rank has left")
                return

    def end(self, timeout: float) -> None:
        """The ranks get so many seconds to leave by themselves; then all goes back to the cluster."""
        self.over.set()
        with suppress(RayError):
            if timeout:
                ray.get([host.stop.remote(timeout) for host in self._hosts], timeout=timeout + STOP_SLACK)
        with suppress(RayError):
            for host in self._hosts:
                ray.kill(host)
            if self._group is not None:
                remove_placement_group(self._group)


def _result(wait: Any) -> str:
    try:
        return str(ray.get(wait))
    except RayError as error:
        return f"its actor is lost: {' '.join(str(error).split())[:300]}"


class RayReplica:
    """A replica somewhere in the cluster (see ``replicas.Replica``)."""

    def __init__(self, config: ControllerConfig, cluster: Cluster, index: int, report: Callable[[int, str], None]) -> None:
        self.info: SchedulerInfo | None = None
        self.address = ""
        self.where = ""
        self.silence: float | None = config.layout.timeout
        self._config = config
        self._cluster = cluster
        self._index = index
        self._report = report
        self._losses = Losses()
        self._lock = threading.Lock()
        self._stopped = False
        self._run = self._new_run()

    def _new_run(self) -> Run:
        bundle = self._cluster.bundle(self._config.scheduler.runner.device)
        return Run(self._cluster, [bundle] * self._config.layout.world_size, f"replica {self._index}")

    def new_ipc(self) -> IpcNames:
        here = f"tcp://{self._cluster.address}:*"
        names = {"tokenizer": here, "detokenizer": here, "token": secrets.token_urlsafe(32)}
        return msgspec.structs.replace(self._config.ipc, **names)

    def start(self, ipc: IpcNames) -> None:
        self._start(ipc, time.monotonic() + ROOM_TIMEOUT)

    def _start(self, ipc: IpcNames, deadline: float) -> None:
        run = self._run
        try:
            places = run.place(deadline)
            (host, port), size = places[0], len(places)
            ipc = msgspec.structs.replace(ipc, scheduler=f"tcp://{host}:{port + 3}")
            base = replica_config(self._config, self._index, ipc, self.info)
            shared = {"nnodes": size, "address": f"{host}:{port}", "token": ipc.token}
            layouts = [msgspec.structs.replace(self._config.layout, node_rank=rank, **shared) for rank in range(size)]
            self.info = run.start([rank_configs(base, layout)[0] for layout in layouts])
        except RayError as error:
            raise StartError(f"replica {self._index} did not start: {' '.join(str(error).split())[:300]}") from None
        self.address, self.where = ipc.scheduler, ", ".join(dict.fromkeys(place[0] for place in places))
        threading.Thread(target=run.watch, args=(self.lose,), name=f"watch-{self._index}", daemon=True).start()

    def lose(self, why: str) -> None:
        with self._lock:
            if self._run.over.is_set():
                return
            self._run.over.set()
        self._report(self._index, why)

    def restart(self, ipc: IpcNames, budget: int) -> bool:
        may = self._losses.add() <= budget
        target, args = (self._again, (ipc,)) if may else (self.stop, ())
        threading.Thread(target=target, args=args, name=f"restart-{self._index}", daemon=True).start()
        return may

    def _again(self, ipc: IpcNames) -> None:
        self._run.end(0)
        with self._lock:
            if self._stopped:
                return
            self._run = self._new_run()
        try:
            self._start(ipc, float("inf"))
        except BanyanError as error:
            self._report(self._index, str(error))
        else:
            self._report(self._index, "")

    def stop(self, timeout: float = 0.0) -> None:
        with self._lock:
            self._stopped = True
        self._run.end(timeout)
