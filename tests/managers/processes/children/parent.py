"""Starts two children, prints pids and socket directory, and waits to be killed. "fork": a process it forked survives it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from banyan.managers.ipc import IpcNames
from banyan.managers.processes.process_group import ChildSpec, ProcessGroup


class Config(msgspec.Struct, frozen=True, kw_only=True):
    ipc: IpcNames
    log_level: str = "error"


ipc = IpcNames.create()
command = [sys.executable, str(Path(__file__).with_name("child.py"))]
group = ProcessGroup()
group.start([ChildSpec(name=name, config=Config(ipc=ipc), command=command) for name in ("scheduler", "detokenizer")], timeout=60)
survivor = os.fork() if "fork" in sys.argv else 0
if "fork" in sys.argv and survivor == 0:
    os.close(0), os.close(1), os.close(2)
    group.stop(0)  # must not touch the owner's children
    time.sleep(20)
    os._exit(0)
print(survivor, ipc.directory, *group.pids(), flush=True)
time.sleep(60)
