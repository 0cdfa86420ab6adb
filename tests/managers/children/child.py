"""A child process with a main function that does what its config says."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
from banyan.managers.errors import StartError
from banyan.managers.ipc import IpcNames
from banyan.managers.process import run_child


class ChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    ipc: IpcNames
    do: str = "serve"
    log_level: str = "error"


def run(config: ChildConfig, ready: Callable[[dict[str, Any]], None]) -> None:
    if config.do == "start_error":
        raise StartError("no such model: /nowhere")
    if config.do == "crash_early":
        raise KeyError("weights")
    if config.do == "segfault_early":
        os.kill(os.getpid(), signal.SIGSEGV)
    if config.do == "never_ready":
        time.sleep(60)
    ready({"pid": os.getpid(), "omp": os.environ.get("OMP_NUM_THREADS"), "thp": os.environ.get("THP_MEM_ALLOC_ENABLE")})
    if config.do in ("crash_late", "leave", "kill_with_heir"):
        while not os.path.exists(f"{config.ipc.directory}/go"):
            time.sleep(0.01)
    if config.do == "crash_late":
        raise ValueError("lost my way")
    if config.do == "leave":
        return
    if config.do == "kill_with_heir":
        # A process of its own holds the report pipe open when this one dies.
        for fd in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{fd}"):
                os.set_inheritable(int(fd), True)
        subprocess.Popen(["sleep", "20"], close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.kill(os.getpid(), signal.SIGKILL)
    if config.do == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-fd", type=int, required=True)
    if "import_error" in sys.argv:
        sys.argv.remove("import_error")
        run_child(lambda: __import__("no_such_module").main, ChildConfig, parser.parse_args().report_fd)
    run_child(lambda: run, ChildConfig, parser.parse_args().report_fd)
