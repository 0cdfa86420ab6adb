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
from banyan.managers.processes.process import run_child


class ChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    ipc: IpcNames
    do: str = "serve"
    log_level: str = "error"


def run(config: ChildConfig, ready: Callable[[dict[str, Any]], None]) -> None:
    BEFORE.get(config.do, lambda: None)()
    ready({"pid": os.getpid(), "omp": os.environ.get("OMP_NUM_THREADS"), "thp": os.environ.get("THP_MEM_ALLOC_ENABLE")})
    if config.do in AFTER:
        while not os.path.exists(f"{config.ipc.directory}/go"):
            time.sleep(0.01)
        AFTER[config.do]()
        return
    if config.do == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def fail(error: Exception) -> None:
    raise error


def die_with_heir() -> None:
    """A process of its own holds the report pipe open when this one dies."""
    for fd in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{fd}"):
            os.set_inheritable(int(fd), True)
    subprocess.Popen(["sleep", "20"], close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGKILL)


BEFORE: dict[str, Callable[[], Any]] = {
    "start_error": lambda: fail(StartError("no such model: /nowhere")),
    "crash_early": lambda: fail(KeyError("weights")),
    "segfault_early": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "never_ready": lambda: time.sleep(60),
}
AFTER: dict[str, Callable[[], Any]] = {
    "crash_late": lambda: fail(ValueError("lost my way")),
    "leave": lambda: None,
    "kill_with_heir": die_with_heir,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-fd", type=int, required=True)
    if "import_error" in sys.argv:
        sys.argv.remove("import_error")
        run_child(lambda: __import__("no_such_module").main, ChildConfig, parser.parse_args().report_fd)
    run_child(lambda: run, ChildConfig, parser.parse_args().report_fd)
