"""A machine of several that takes no requests: it runs its ranks until rank 0 says that it is over, or one of them dies."""

from __future__ import annotations

import logging
import os
import signal
import threading

from ..managers.errors import EngineDeadError
from ..managers.ipc import IpcNames
from ..managers.processes.process_group import ChildSpec, ProcessGroup
from ..managers.ranks.layout import rank_configs, rank_name
from .launcher import START_TIMEOUT
from .model_source import resolve_model
from .server_args import ServerArgs

log = logging.getLogger(__name__)

POLL = 0.5  # seconds
REST_TIMEOUT = 5.0  # seconds that the other ranks get when one has left
STOP_TIMEOUT = 2.0


def serve_ranks(args: ServerArgs) -> int:
    """Run the ranks of this machine; 0 when rank 0 ended them or a signal came. Raises StartError, EngineDeadError."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    ipc, group = IpcNames.create(), ProcessGroup()
    model_path = os.fspath(resolve_model(args.model_path, args.revision, args.download_dir).path)
    configs = rank_configs(args.scheduler_config(ipc, model_path), args.layout())
    try:
        group.start([ChildSpec(name=rank_name(one), kind="scheduler", config=one) for one in configs], START_TIMEOUT)
        log.info("Machine %d of %d: %d ranks run", args.node_rank, args.nnodes, len(configs))
        while len(group.pids()) == len(configs) and not stopped.wait(POLL):
            pass
        for child in group.children:
            child.join(0 if stopped.is_set() else REST_TIMEOUT)
            if child.dead and not child.ended_well:
                raise EngineDeadError(f"the {child.name} process died: {child.cause_of_death()}", child.traceback)
    finally:
        group.stop(STOP_TIMEOUT)
        ipc.remove()
    return 0
