"""The replicas' processes: started together, watched, and started again one by one when one of their ranks is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ..config import ControllerConfig, SchedulerConfig, SchedulerInfo
from ..errors import BanyanError, EngineDeadError
from ..processes.process_group import ChildSpec, ProcessGroup
from ..ranks.layout import meeting_again, rank_configs, rank_name

logger = logging.getLogger(__name__)

WINDOW = 3600.0  # seconds in which the deaths of a replica are counted
START_TIMEOUT = 1800.0


class ReplicaGroup:
    """The processes of one replica. report(index, why) is called on any thread: it is lost, or with an empty text back again."""

    def __init__(self, index: int, specs: list[ChildSpec], report: Callable[[int, str], None]) -> None:
        self.index = index
        self.info: SchedulerInfo | None = None
        self._specs = specs
        self._report = report
        self._group = ProcessGroup()
        self._deaths: deque[float] = deque()

    def start(self) -> None:
        """Raises StartError."""
        payloads = self._group.start(self._specs, START_TIMEOUT)
        self.info = msgspec.convert(payloads[self._specs[0].name], SchedulerInfo)
        self._group.watch(self._died)

    def _died(self, error: EngineDeadError) -> None:
        self._report(self.index, f"{error}\n{error.detail}" if error.detail else str(error))

    def restart(self, budget: int) -> bool:
        """Stop what is left of it and start it again on a thread of its own; False if it has died too often."""
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > WINDOW:
            self._deaths.popleft()
        self._deaths.append(now)
        may = len(self._deaths) <= budget
        threading.Thread(target=self._again if may else self.stop, name=f"restart-{self.index}", daemon=True).start()
        return may

    def _again(self) -> None:
        old, self._group = self._group, ProcessGroup()
        old.stop(0)
        attempt = time.monotonic_ns()
        self._specs = [self._renewed(spec, attempt) for spec in self._specs]
        try:
            self.start()
        except BanyanError as error:
            self._report(self.index, str(error))
        else:
            self._report(self.index, "")

    def _renewed(self, spec: ChildSpec, attempt: int) -> ChildSpec:
        runner = spec.config.runner
        total = self.info.max_total_num_tokens if self.info else runner.max_total_tokens
        runner = msgspec.structs.replace(runner, max_total_tokens=total, ranks=meeting_again(runner.ranks, attempt))
        return msgspec.structs.replace(spec, config=msgspec.structs.replace(spec.config, runner=runner))

    def pids(self) -> list[int]:
        return self._group.pids()

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


def replica_config(config: ControllerConfig, index: int) -> SchedulerConfig:
    """The config of a replica's schedulers: sockets of its own, and its answers come to the controller."""
    base, directory = config.scheduler, config.ipc.directory
    ipc = msgspec.structs.replace(
        config.ipc, scheduler=f"ipc://{directory}/scheduler-{index}", tokenizer=f"ipc://{directory}/replies-{index}"
    )
    record = f"{base.record_decisions}.dp{index}" if base.record_decisions else None
    return msgspec.structs.replace(base, ipc=ipc, record_decisions=record, tells_ended=True)


def replica_specs(config: ControllerConfig, index: int) -> list[ChildSpec]:
    """What to start for a replica."""
    layout = msgspec.structs.replace(config.layout, replica=index, num_replicas=config.dp_size)
    configs: list[Any] = rank_configs(replica_config(config, index), layout)
    return [ChildSpec(name=f"replica {index}'s {rank_name(one)}", kind="scheduler", config=one) for one in configs]
