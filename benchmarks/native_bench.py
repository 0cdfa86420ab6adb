"""The head that benchmarks of the native kernels share: common options, and the kernels."""

from __future__ import annotations

import argparse

import torch

from banyan.layers.kernels.cpu.library import Native, native_kernels


def numbers(text: str) -> list[int]:
    """An option's value: numbers between commas, maybe none."""
    return [int(part) for part in filter(None, text.split(","))]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that all have; ``begin`` parses."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="threads, if not torch's default")
    parser.add_argument("--json", help="file for everything that was measured")
    return parser


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Native]:
    """The arguments, with the threads set that they ask for. Exits with status 1 where there are no native kernels."""
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    native = native_kernels()
    if not isinstance(native, Native):
        parser.exit(1, f"{parser.prog}: error: {native.why}\n")
    return args, native


def setting(native: Native) -> dict[str, int | str]:
    """What decides over a kernel's speed besides the machine."""
    return {"threads": torch.get_num_threads(), "kernels": native.isa}
