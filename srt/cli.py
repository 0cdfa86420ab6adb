"""The command ``banyan``. Importing it is light: what a subcommand needs is imported when it runs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from ..managers.errors import BanyanError, EngineDeadError, StartError
from ..managers.log_limit import limit_repeats
from ..version import __version__
from .cli_tools import add_commands
from .server_args import ServerArgs, add_arguments

LOG_FORMAT = "[%(asctime)s] %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status. 1: it failed, and one line on stderr says why. 2: wrong usage."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        status: int = options.run(parser, options)
    except (StartError, EngineDeadError) as error:
        if error.detail:
            print(error.detail.rstrip(), file=sys.stderr)
        return _fail(error)
    except BanyanError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130
    return status


def _fail(error: Exception) -> int:
    print(f"banyan: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="banyan", description="A serving engine for language models.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP", description="Serve a model over HTTP.")
    serve.set_defaults(run=_serve)
    serve.add_argument("model", nargs="?", help="the same as --model-path")
    serve.add_argument("--explain", action="store_true", help="start, print every value with the reason for it, and stop")
    add_arguments(serve)

    fetch = commands.add_parser(
        "fetch", help="download a model", description="Download a model, so that serving it starts at once."
    )
    fetch.set_defaults(run=_fetch)
    fetch.add_argument("model", nargs="?", default="smollm2", help="alias or hub id (default: smollm2)")
    fetch.add_argument("--revision", help="branch, tag or commit of a model from the hub")
    fetch.add_argument("--download-dir", help="folder for downloaded models, if not the user's cache folder")

    kernels = commands.add_parser(
        "build-kernels",
        help="build the native CPU kernels",
        description="Build the native CPU kernels into the user's cache folder, so that the first start need not. BANYAN_CPU_ISA "
        "names an instruction set (generic, avx2, avx512, avx512_bf16), if not the best that the CPU has; CXX names the compiler.",
    )
    kernels.set_defaults(run=_build_kernels)

    replay = commands.add_parser(
        "replay",
        help="check a record of decisions",
        description="Take the decisions in a file of --record-decisions again, and show the first that is different now.",
    )
    replay.set_defaults(run=_replay)
    replay.add_argument("file", help="the recorded file, or a crash dump that goes back to the start")

    add_commands(commands, make_parser)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _serve(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.model is not None:
        if "model_path" in options:
            parser.error("give the model once, as an argument or as --model-path")
        options.model_path = options.model
    args = ServerArgs.from_namespace(options)
    _set_up_log(args.log_level)
    from .serve import explain, serve

    return explain(args) if options.explain else serve(args)


def _fetch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    _set_up_log("info")
    from .model_source import resolve_model

    print(resolve_model(options.model, options.revision, options.download_dir).path)
    return 0


def _build_kernels(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    import subprocess

    package = __package__.rpartition(".")[0]  # a child: nothing here may import what computes
    return subprocess.run([sys.executable, "-m", f"{package}.layers.kernels.cpu.build"], check=False).returncode


def _replay(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ..managers.decisions.replay import replay

    result = replay(options.file)
    print(f"{result.num_turns} turns checked, {'no difference' if result.difference is None else 'a difference'}")
    for text in filter(None, (result.note, result.difference)):
        print(text)
    return 0 if result.difference is None else 1


def _version(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    print(__version__)
    return 0


def _set_up_log(level: str) -> None:
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, datefmt=DATE_FORMAT, stream=sys.stderr)
    limit_repeats()
