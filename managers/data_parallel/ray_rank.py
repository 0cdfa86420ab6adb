"""RankHost: a Ray actor that runs one rank of a replica as a process of its own.

The actor starts and watches; requests, tokens and turns go over the rank's own sockets, and nothing but configs and reports passes
through Ray. When the actor dies, by any cause, so does the rank, since it notices that its parent is gone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import msgspec
import ray

from ..config import SchedulerConfig
from ..errors import EngineDeadError, StartError
from ..ipc import IpcNames
from ..processes.process_group import ChildSpec, ProcessGroup
from ..ranks.layout import rank_name

NUM_PORTS = 4  # where ranks meet, turns, signs of life, requests
NUM_TRIES = 200


class RankHost:
    """Methods are called from the controller's process; several may run at the same time."""

    def __init__(self) -> None:
        self._group = ProcessGroup()
        self._over = threading.Event()
        self._cause = ""

    def place(self) -> tuple[str, int]:
        """The node's address, and the first of NUM_PORTS consecutive ports that are free on it."""
        address: str = ray.util.get_node_ip_address()
        return address, free_ports(address)

    def start(self, config_json: bytes, timeout: float) -> dict[str, Any]:
        """Start the rank and wait until it is ready: {"ready": its report}, or {"error", "detail"}."""
        config = msgspec.json.decode(config_json, type=SchedulerConfig)
        own = IpcNames.create()
        config = msgspec.structs.replace(config, ipc=msgspec.structs.replace(config.ipc, directory=own.directory))
        spec = ChildSpec(name=rank_name(config), kind="scheduler", config=config)
        try:
            (payload,) = self._group.start([spec], timeout).values()
        except StartError as error:
            own.remove()
            return {"error": str(error), "detail": error.detail}
        self._group.watch(self._died)
        return {"ready": payload}

    def _died(self, error: EngineDeadError) -> None:
        self._cause = f"{error}\n{error.detail}" if error.detail else str(error)
        self._over.set()

    def wait(self) -> str:
        """Return when the rank is over: why it died, or nothing if it was stopped."""
        self._over.wait()
        return self._cause

    def stop(self, timeout: float) -> None:
        """The rank gets ``timeout`` seconds to leave by itself."""
        self._group.stop(timeout)
        self._over.set()


def free_ports(address: str) -> int:
    """The first of NUM_PORTS consecutive ports on which nobody listens at this address."""
    for _ in range(NUM_TRIES):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first: int = stack.enter_context(socket.create_server((address, 0))).getsockname()[1]
            for port in range(first + 1, first + NUM_PORTS):
                stack.enter_context(socket.create_server((address, port)))
            return first
    raise RuntimeError(f"no {NUM_PORTS} consecutive ports are free on {address}")
