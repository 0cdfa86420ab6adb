"""Entry point of the engine's child processes; ``process_group`` is the parent's side.

``python -m banyan.managers.processes.process scheduler|controller|detokenizer --report-fd N`` reads its config as one line of
JSON from stdin and reports on the inherited pipe N, in JSON lines: {"status": "ready", "payload": ...}, or {"status": "error",
"message": ..., "traceback": ...}. Its stdin stays open as long as the parent lives: end of file there, or another parent pid,
ends the child.

Plain subprocesses instead of multiprocessing: no __main__ guard is needed, and it works from threads, notebooks and the REPL.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO, NoReturn

import msgspec

from ..config import ControllerConfig, DetokenizerConfig, SchedulerConfig
from ..errors import StartError
from ..log_limit import limit_repeats
from ..processes import stacks
from .reports import Reports, leave

# name -> (module, function, type of config); imported only in the child that runs it
MAINS: dict[str, tuple[str, str, type[msgspec.Struct]]] = {
    "scheduler": ("scheduler_process", "run_scheduler", SchedulerConfig),
    "controller": ("data_parallel.controller", "run_controller", ControllerConfig),
    "detokenizer": ("detokenizer_manager", "run_detokenizer", DetokenizerConfig),
}
PARENT_POLL = 1.0  # seconds; end of file comes at once, the pid is asked this often
EXIT_ORPHAN = 3

Main = Callable[[Any, Reports], None]


def run_child(load_main: Callable[[], Main], config_type: type[msgspec.Struct], report_fd: int) -> NoReturn:
    """Run a child's main function and exit: 0 when it returned, 1 with a report when it raised.

    load_main imports late, so that an import error is reported too. Ctrl-C reaches the whole process group of a terminal, but only
    the parent decides: SIGINT is ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr is not None:  # a daemon may have none
        faulthandler.enable()
    os.set_inheritable(report_fd, False)
    reports = Reports(report_fd)
    try:
        config: Any = msgspec.json.decode(sys.stdin.buffer.readline(), type=config_type)
        _watch_parent(sys.stdin.buffer, config)
        stacks.install(config.ipc.directory)
        _set_up_log(config)
        load_main()(config, reports)
    except BaseException as error:
        detail = traceback.format_exc()
        message = str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"
        reports.error(message, detail)
        leave(1)
    leave(0)


def _watch_parent(stdin: BinaryIO, config: Any) -> None:
    """Start the thread that ends this process when its parent is gone.

    PR_SET_PDEATHSIG would not do: it fires when the parent's *thread* that started the child ends. A process that the parent forked
    may hold a copy of the pipe's other end, so the pid is watched too.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([stdin], [], [], PARENT_POLL)
            if readable and not os.read(stdin.fileno(), 1024):
                break
        if not config.ipc.borrowed:  # the parent cannot clean up any more, if it was killed
            config.ipc.remove()
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _set_up_log(config: Any) -> None:
    logging.basicConfig(level=config.log_level.upper(), format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    limit_repeats()


def main() -> NoReturn:
    """Entry of the children."""
    parser = argparse.ArgumentParser(prog="banyan.managers.processes.process")
    parser.add_argument("name", choices=sorted(MAINS))
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args()
    module, function, config_type = MAINS[options.name]

    def load_main() -> Main:
        loaded: Main = getattr(import_module(f"banyan.managers.{module}"), function)
        return loaded

    run_child(load_main, config_type, options.report_fd)


if __name__ == "__main__":
    main()
