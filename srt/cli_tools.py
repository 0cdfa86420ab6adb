"""The commands for whoever runs servers: check, top, dump, completion."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from .server_args import ServerArgs, add_arguments

URL = "http://127.0.0.1:30000"


def add_commands(commands: Any, root: Callable[[], argparse.ArgumentParser]) -> None:
    """Add them to the subparsers of ``banyan``, whose parser ``root`` makes."""
    check = commands.add_parser(
        "check", help="inspect machine and options", description="Inspect machine and options before a start."
    )
    check.set_defaults(run=_check)
    add_arguments(check)

    top = commands.add_parser("top", help="watch a server", description="Watch queues, batch, cache and latencies of a server.")
    top.set_defaults(run=_top)
    _add_server(top)
    top.add_argument("--interval", type=float, default=1.0, help="seconds between two pictures (default: 1)")
    top.add_argument("--once", action="store_true", help="draw one picture and stop")

    dump = commands.add_parser(
        "dump", help="write down what a server does", description="Write stacks, state and last batches of a running server."
    )
    dump.set_defaults(run=_dump)
    _add_server(dump)
    dump.add_argument("--output", help="folder to write to (default: banyan-dump-TIME)")

    completion = commands.add_parser(
        "completion", help="script for the shell", description="Print a script that completes commands and options."
    )
    completion.set_defaults(run=lambda parser, options: _completion(root(), options))
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=URL, help=f"the server (default: {URL})")
    parser.add_argument("--api-key", default=os.environ.get("BANYAN_API_KEY"), help="its key; also BANYAN_API_KEY")


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from .check import check, report

    findings = check(ServerArgs.from_namespace(options))
    print(report(findings))
    return int(any(finding.level == "error" for finding in findings))


def _top(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from .plain_http import Server
    from .top import top

    top(Server(options.url, options.api_key), interval=max(options.interval, 0.1), once=options.once)
    return 0


def _dump(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from .dump import write_dump
    from .plain_http import Server

    print(write_dump(Server(options.url, options.api_key), options.output))
    return 0


def _completion(root: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from .completion import script

    print(script(root, options.shell), end="")
    return 0
