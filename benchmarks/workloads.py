"""Workloads: what the clients of a benchmark ask for. A function of its arguments and the seed, and of nothing else.

A session is a client that sends its turns one after the other; most have one turn. Prompts are random token ids: they cost what
text costs, and no two share a prefix by accident. Random ids may include special ones, so outputs are run with ignore_eos.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DEFAULTS = {
    "num_prompts": 64,
    "groups": 4,
    "prompts_per_group": 16,
    "shared_len": 512,
    "conversations": 8,
    "turns": 4,
}
OPTIONS = {  # workload -> the options that only it has
    "random": ("num_prompts",),
    "shared-prefix": ("groups", "prompts_per_group", "shared_len"),
    "multi-turn": ("conversations", "turns"),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """What a session says next. The prompt sent is all prompts and outputs of the turns before, then ``input_ids``."""

    input_ids: list[int]
    output_len: int


Session = list[Turn]


def length_range(text: str) -> tuple[int, int]:
    """``128`` or ``64-256``, both ends included, as an argparse type."""
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a length nor a range such as 64-256") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths are at least 1 and a range goes upwards")
    return bounds


def positive(text: str) -> int:
    """An integer of at least 1, as an argparse type."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that describe a workload."""
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=list(OPTIONS), default="random")
    group.add_argument("--seed", type=int, default=0, help="of the workload and of the arrival times (default: 0)")
    group.add_argument(
        "--input-len",
        type=length_range,
        default=(64, 256),
        metavar="N|LO-HI",
        help="tokens of a prompt; of its own part with shared-prefix, of a turn with multi-turn (default: 64-256)",
    )
    group.add_argument(
        "--output-len", type=length_range, default=(32, 32), metavar="N|LO-HI", help="tokens per output (default: 32)"
    )
    words = {
        "num_prompts": "requests",
        "groups": "prefixes that are shared",
        "prompts_per_group": "requests per shared prefix",
        "shared_len": "tokens of a shared prefix",
        "conversations": "clients, each of which talks",
        "turns": "requests per conversation",
    }
    for workload, names in OPTIONS.items():
        for name in names:
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, type=positive, help=f"{workload}: {words[name]} (default: {DEFAULTS[name]})")


def complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in the defaults of the chosen workload; an option of another workload is an error."""
    for workload, names in OPTIONS.items():
        for name in names:
            if workload == args.workload:
                if getattr(args, name) is None:
                    setattr(args, name, DEFAULTS[name])
            elif getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} belongs to --workload {workload}, not to {args.workload}")


def settings(args: argparse.Namespace) -> dict[str, int | str]:
    """What the options say, for the report."""
    lengths = {name: "-".join(map(str, dict.fromkeys(getattr(args, name)))) for name in ("input_len", "output_len")}
    own = {name: getattr(args, name) for name in OPTIONS[args.workload]}
    return {"workload": args.workload, **own, **lengths, "seed": args.seed}


def build(args: argparse.Namespace, vocab_size: int) -> list[Session]:
    """The sessions in their order of arrival."""
    makers: dict[str, Callable[..., list[Session]]] = {
        "random": _random,
        "shared-prefix": _shared_prefix,
        "multi-turn": _multi_turn,
    }
    return makers[args.workload](args, _Source(args.seed, vocab_size, args))


def arrivals(num_sessions: int, request_rate: float | None, seed: int) -> np.ndarray:
    """Seconds after the start at which each session begins: a Poisson process, or all at once where there is no rate."""
    if request_rate is None:
        return np.zeros(num_sessions)
    gaps = np.random.default_rng((seed, 1)).exponential(1 / request_rate, num_sessions)
    return np.concatenate(([0.0], np.cumsum(gaps[1:])))


class _Source:
    """Draws ids and lengths."""

    def __init__(self, seed: int, vocab_size: int, args: argparse.Namespace) -> None:
        self.rng = np.random.default_rng((seed, 0))
        self._vocab_size = vocab_size
        self._lengths = args.input_len, args.output_len

    def ids(self, count: int) -> list[int]:
        drawn: list[int] = self.rng.integers(0, self._vocab_size, count).tolist()
        return drawn

    def turn(self, shared: list[int] | None = None) -> Turn:
        """A turn of ``shared`` and as many own ids as --input-len says."""
        own, output_len = (int(self.rng.integers(low, high, endpoint=True)) for low, high in self._lengths)
        return Turn((shared or []) + self.ids(own), output_len)


def _random(args: argparse.Namespace, source: _Source) -> list[Session]:
    return [[source.turn()] for _ in range(args.num_prompts)]


def _shared_prefix(args: argparse.Namespace, source: _Source) -> list[Session]:
    """The groups' requests come in random order."""
    sessions = []
    for _ in range(args.groups):
        shared = source.ids(args.shared_len)
        sessions += [[source.turn(shared)] for _ in range(args.prompts_per_group)]
    return [sessions[i] for i in source.rng.permutation(len(sessions))]


def _multi_turn(args: argparse.Namespace, source: _Source) -> list[Session]:
    return [[source.turn() for _ in range(args.turns)] for _ in range(args.conversations)]
