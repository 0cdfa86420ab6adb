"""``banyan serve``: bind, start the engine's processes, import the HTTP server while they load; and ``--explain``."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import msgspec
import uvloop

from ..managers.config import SchedulerInfo
from ..managers.processes.start_clock import StartClock
from .info import shown
from .launcher import Launched, launch
from .leave import leave_on_signals
from .listen import bind
from .server_args import ServerArgs, options


def serve(args: ServerArgs) -> int:
    """Serve until a signal comes; the exit status. Raises StartError, and EngineDeadError when a process of the engine died.

    The first SIGTERM or SIGINT drains: nothing new is accepted, what runs may finish. The second ends at once.
    """
    if args.node_rank > 0:
        from .worker_node import serve_ranks

        return serve_ranks(args)
    clock = StartClock()
    sock = bind(args.host, args.port)  # before a model is loaded for minutes
    leave_on_signals()
    launching = _launch_aside(args)
    from .life import Life  # the children import what computes meanwhile

    clock.lap("interface")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Life(args, sock, launching, clock).run())


def _launch_aside(args: ServerArgs) -> Future[Launched]:
    """``launch`` on a thread of its own, which is no reason for a process that ends to wait."""
    future: Future[Launched] = Future()

    def run() -> None:
        try:
            future.set_result(launch(args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="launch", daemon=True).start()
    return future


def explain(args: ServerArgs) -> int:
    """Start the engine, print every value and why it is so, stop it."""
    launched = launch(args)
    try:
        print("\n".join(explanation(args, launched.info)))
    finally:
        launched.stop(0)
    return 0


def explanation(args: ServerArgs, info: SchedulerInfo) -> list[str]:
    """One line for each option and each derived value."""
    lines = ["Options:"]
    for option in options():
        value = shown(option.name, getattr(args, option.name))
        lines.append(f"  {option.name} = {value!r}  ({'default' if value == option.default else 'set'}; {option.help})")
    values = {**msgspec.to_builtins(info.model), **msgspec.to_builtins(info)}
    reasons = {**info.model.explain, **info.explain}
    plain = {name: value for name, value in values.items() if name not in ("explain", "model")}
    lines.append("Derived:")
    for name in dict.fromkeys([*plain, *reasons]):
        value = f" = {plain[name]!r}" if name in plain else ""
        reason = f"  ({reasons[name]})" if name in reasons else ""
        lines.append(f"  {name}{value}{reason}")
    return lines
