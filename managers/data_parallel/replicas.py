"""The replicas' processes: started together, watched, and started again one by one when one of their ranks is lost."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from ..config import ControllerConfig, SchedulerConfig, SchedulerInfo
from ..errors import BanyanError, EngineDeadError
from ..ipc import IpcNames
from ..processes.process_group import ChildSpec, ProcessGroup
from ..ranks.layout import rank_configs, rank_name

WINDOW = 3600.0  # seconds in which the deaths of a replica are counted
START_TIMEOUT = 1800.0


class Replica(Protocol):
    """A replica as the controller starts it. report(index, why) is called on any thread: it is lost, or with an empty text back."""

    info: SchedulerInfo | None  # once it has started
    address: str  # where its present run listens
    where: str  # the machine, for people; empty: this one
    silence: float | None  # seconds without a sign of life after which a run counts as lost; None: its processes are watched

    def new_ipc(self) -> IpcNames:
        """Addresses for another run."""

    def start(self, ipc: IpcNames) -> None:
        """Start a run and wait until it is ready. Raises StartError."""

    def restart(self, ipc: IpcNames, budget: int) -> bool:
        """Stop what is left and start another run on a thread of its own; False if it was lost too often."""

    def lose(self, why: str) -> None:
        """The present run counts as lost."""

    def stop(self, timeout: float) -> None:
        """Stop it for good; it gets ``timeout`` seconds to leave by itself."""


class Losses:
    """How often a replica was lost within an hour."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def add(self) -> int:
        """Once more; how often."""
        now = time.monotonic()
        while self._times and now - self._times[0] > WINDOW:
            self._times.popleft()
        self._times.append(now)
        return len(self._times)


class ReplicaGroup:
    """The processes of a replica on this machine."""

    where = ""
    silence: float | None = None

    def __init__(self, config: ControllerConfig, index: int, report: Callable[[int, str], None]) -> None:
        self.info: SchedulerInfo | None = None
        self.address = ""
        self._config = config
        self._index = index
        self._report = report
        self._group = ProcessGroup()
        self._losses = Losses()
        self._run = 0

    def new_ipc(self) -> IpcNames:
        ipc, self._run = self._config.ipc, self._run + 1
        own = f"ipc://{ipc.directory}/{{}}-{self._index}" + (f"-{self._run}" if self._run > 1 else "")
        return msgspec.structs.replace(ipc, scheduler=own.format("scheduler"), tokenizer=own.format("replies"), borrowed=True)

    def start(self, ipc: IpcNames) -> None:
        layout = msgspec.structs.replace(self._config.layout, replica=self._index, num_replicas=self._config.dp_size)
        configs = rank_configs(replica_config(self._config, self._index, ipc, self.info), layout)
        specs = [ChildSpec(name=f"replica {self._index}'s {rank_name(one)}", kind="scheduler", config=one) for one in configs]
        payloads = self._group.start(specs, START_TIMEOUT)
        self.info = msgspec.convert(payloads[specs[0].name], SchedulerInfo)
        self.address = ipc.scheduler
        self._group.watch(self._died)

    def _died(self, error: EngineDeadError) -> None:
        self._report(self._index, f"{error}\n{error.detail}" if error.detail else str(error))

    def restart(self, ipc: IpcNames, budget: int) -> bool:
        may = self._losses.add() <= budget
        again = partial(self._again, ipc) if may else self.stop
        threading.Thread(target=again, name=f"restart-{self._index}", daemon=True).start()
        return may

    def _again(self, ipc: IpcNames) -> None:
        old, self._group = self._group, ProcessGroup()
        old.stop(0)
        try:
            self.start(ipc)
        except BanyanError as error:
            self._report(self._index, str(error))
        else:
            self._report(self._index, "")

    def lose(self, why: str) -> None:
        """Never: the processes are watched."""

    def stop(self, timeout: float = 0.0) -> None:
        self._group.stop(timeout)


class Changes:
    """What threads tell the controller's loop; ``fd`` becomes readable with the first of it."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        self._changes: deque[tuple[int, str]] = deque()

    def put(self, index: int, why: str) -> None:
        self._changes.append((index, why))
        os.write(self._write, b".")

    def take(self) -> list[tuple[int, str]]:
        """All changes so far, in their order."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        changes = []
        while self._changes:
            changes.append(self._changes.popleft())
        return changes


def replica_config(config: ControllerConfig, index: int, ipc: IpcNames, info: SchedulerInfo | None) -> SchedulerConfig:
    """The config of a replica's schedulers. info: of an earlier run, whose size must hold for the next: requests were checked
    against it."""
    base = config.scheduler
    record = f"{base.record_decisions}.dp{index}" if base.record_decisions else None
    total = info.max_total_num_tokens if info else base.runner.max_total_tokens
    runner = msgspec.structs.replace(base.runner, max_total_tokens=total)
    return msgspec.structs.replace(base, ipc=ipc, runner=runner, record_decisions=record, tells_ended=True)
