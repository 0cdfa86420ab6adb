"""Engines side by side on this machine: the same weights, the same requests, in turn.

    python benchmarks/compare.py                                     # every engine, bfloat16, two rounds
    python benchmarks/compare.py --engines banyan,llama.cpp --workloads W1,W3 --precision int8
    python benchmarks/compare.py --write docs/performance.md         # put the table into the page

Other engines are installed with pip into environments of their own under --root (llama.cpp is compiled: minutes). A round runs each
engine once, started anew: A B C A B C. A cell is the median over the rounds and its spread. compare_workloads.py has the loads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from compare_workloads import WORKLOADS, Source, WorkloadFailed, warm_up
from http_load import Client
from marked_block import write_block
from peer_models import prepare, vocab_size
from peers import PEERS, Models, Peer
from report import environment, environment_lines, publish, table

TARGETS = {  # ours beside the best of the others, by precision: at most
    "bf16": {
        "W1 time per token": 0.8,
        "W1 time to first token": 0.9,
        "W2 total": 0.85,
        "W3 total": 0.75,
        "W4 total": 0.75,
        "W5 worst gap": 0.35,
    },
    "int8": {
        "W1 time per token": 0.75,
        "W1 time to first token": 0.9,
        "W2 total": 0.8,
        "W3 total": 0.75,
        "W4 total": 0.7,
        "W5 worst gap": 0.35,
    },
    "int4": {"W1 time per token": 0.9, "W2 total": 0.9},
}
START, MEMORY, SAME_IDS = "start to first token", "peak memory", "W1 ids equal to ours, of 384"
OURS = "banyan"


class PeerFailed(Exception):
    """An engine did not start or broke a workload off; the others go on."""


@dataclass(slots=True)
class Measured:
    """What one engine came to, over the rounds."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list)  # of W1
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)


class PeakMemory:
    """Most proportional memory (PSS) of a process and its children, read five times a second."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._root = psutil.Process(pid)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            total = 0
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (self._root, *self._root.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        total += process.memory_full_info().pss
            self.peak = max(self.peak, total)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak


@contextlib.contextmanager
def running(peer: Peer, root: Path, models: Models, precision: str) -> Iterator[tuple[str, int]]:
    """(base URL, process) of an engine that answers its health route. Raises PeerFailed with the end of its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = root / f"{peer.name}.log"
    with log.open("wb") as file:
        command = peer.command(peer.python(root), models, precision, port)
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **peer.environment}, start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}{peer.health}", log)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, timeout: float = 600) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    lines = log.read_text(errors="replace").splitlines()[-12:]
    raise PeerFailed("did not start:\n" + "\n".join(lines))


def measure(peer: Peer, root: Path, models: Models, args: argparse.Namespace, into: Measured) -> None:
    """One round of one engine."""
    begin = time.perf_counter()
    try:
        with running(peer, root, models, args.precision) as (url, pid):
            memory = PeakMemory(pid)
            try:
                asyncio.run(_workloads(peer, url, begin, args, into))
            finally:
                into.add(MEMORY, memory.stop() / 1e9)
    except (PeerFailed, WorkloadFailed) as error:
        into.failures.append(str(error))
        print(f"{peer.name}: {error}", file=sys.stderr, flush=True)


async def _workloads(peer: Peer, url: str, begin: float, args: argparse.Namespace, into: Measured) -> None:
    client = Client(url, peer.backend(), headers={}, timeout=1200)
    try:
        first = await client.send(list(range(100, 132)), 4)  # a first token may end inside a character, which some send later
        if first.error is not None:
            raise WorkloadFailed(f"{first.error}: {first.message}")
        into.add(START, time.perf_counter() - begin)
        await warm_up(client, Source(args.seed + 1, args.vocab_size))
        for name in args.workloads:
            try:
                figures = await WORKLOADS[name](client, Source(args.seed, args.vocab_size))
            except WorkloadFailed as error:
                into.failures.append(f"{name}: {error}")
                print(f"{peer.name}: {name}: {error}", file=sys.stderr, flush=True)
                continue
            into.outputs = figures.outputs or into.outputs
            for figure, seconds in figures.seconds.items():
                into.add(figure, seconds)
                print(f"{peer.name}: {figure}: {seconds:.4f} s", file=sys.stderr, flush=True)
    finally:
        await client.close()


def rows(results: dict[str, Measured], precision: str) -> list[list[str]]:
    """A row per figure: a cell per engine, ours beside the best of the others, the target."""
    names = list(dict.fromkeys(name for measured in results.values() for name in measured.figures))
    lines = []
    for name in names:
        medians = {engine: statistics.median(m.figures[name]) for engine, m in results.items() if name in m.figures}
        others = [value for engine, value in medians.items() if engine != OURS]
        ratio = f"{medians[OURS] / min(others):.2f}" if OURS in medians and others else "-"
        target = TARGETS[precision].get(name)
        cells = [_cell(measured.figures.get(name), name) for measured in results.values()]
        lines.append([f"{name}, {_unit(name)}", *cells, ratio, "-" if target is None else f"{target:.2f}"])
    ours = results[OURS].outputs if OURS in results else []
    if ours:
        same = [_same(ours, measured.outputs) for measured in results.values()]
        lines.append([SAME_IDS, *same, "-", "-"])
    return lines


def _unit(name: str) -> str:
    return "GB" if name == MEMORY else "ms" if name == "W1 time per token" else "s"


def _cell(values: Sequence[float] | None, name: str) -> str:
    if not values:
        return "-"
    scaled = [value * 1e3 if _unit(name) == "ms" else value for value in values]
    spread = f" ({min(scaled):.2f}-{max(scaled):.2f})" if len(scaled) > 1 else ""
    return f"{statistics.median(scaled):.2f}{spread}"


def _same(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """Tokens of W1 up to the first difference of each output: greedy ids part where two logits tie within the rounding."""
    if not theirs:
        return "-"
    count = 0
    for a, b in zip(ours, theirs, strict=True):
        count += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return str(count)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(PEERS), help=f"of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of {', '.join(WORKLOADS)} (default: all)")
    parser.add_argument("--precision", choices=list(TARGETS), default="bf16", help="of the weights (default: bf16)")
    parser.add_argument("--rounds", type=int, default=2, help="times that each engine is started and measured (default: 2)")
    parser.add_argument("--model", default="smollm2", choices=["smollm2"], help="whose weights (default: smollm2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path.home() / ".cache" / "banyan" / "peers", help="environments and weights")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the marks compare-PRECISION of a page")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    args = parser.parse_args(argv)
    for option, known in (("engines", PEERS), ("workloads", WORKLOADS)):
        chosen = getattr(args, option).split(",")
        if unknown := [name for name in chosen if name not in known]:
            parser.error(f"--{option}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
        setattr(args, option, chosen)
    args.engines = [name for name in args.engines if args.precision in PEERS[name].precisions]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.root.mkdir(parents=True, exist_ok=True)
    models = prepare(args.model, args.root)
    args.vocab_size = vocab_size(models)
    peers = [PEERS[name] for name in args.engines]
    for peer in peers:
        peer.install(args.root)
    facts = environment()
    facts["versions"] |= {peer.name: peer.version(args.root) for peer in peers if peer.packages}
    results = {peer.name: Measured() for peer in peers}
    for _ in range(args.rounds):
        for peer in peers:
            measure(peer, args.root, models, args, results[peer.name])
    head = [f"{args.precision}, {args.rounds} rounds", *results, "ours / best other", "target"]
    lines = rows(results, args.precision)
    failures = {name: measured.failures for name, measured in results.items() if measured.failures}
    report: dict[str, Any] = {
        "environment": facts,
        "setting": {"model": args.model, "precision": args.precision, "rounds": args.rounds, "seed": args.seed},
        "result": {name: {"figures": measured.figures, "failures": measured.failures} for name, measured in results.items()},
    }
    publish(report, head, lines, args.json)
    if args.write is not None:
        notes = "\n".join(["", *environment_lines(facts), *(f"{name}: {len(lost)} failed" for name, lost in failures.items())])
        write_block(args.write, f"compare-{args.precision}", table(head, lines) + "\n" + notes.replace("\n", "\n    ") + "\n")
    return 1 if OURS in failures else 0


if __name__ == "__main__":
    sys.exit(main())
