"""Engines side by side on this machine: the same weights, the same requests, in turn.

    python benchmarks/compare.py                                     # every engine, bfloat16, two rounds
    python benchmarks/compare.py --engines banyan,llama.cpp --workloads W1,W3 --precision int8
    python benchmarks/compare.py --write docs/performance.md         # put the table into the page
    python benchmarks/compare.py --rounds 0                          # the table of what was measured before

Other engines are installed with pip into environments of their own under --root (llama.cpp is compiled: minutes). A round runs each
engine once, started anew: A B C A B C. A cell is the median over the rounds and its spread. compare_workloads.py has the loads.

Results are kept under --root by precision, engine and load, and the table is of all that are kept: a run of a few loads replaces
those alone. Notes under the table say which run each comes from. A load that fails, or that takes longer than --load-timeout, is a
cell that says so; the engine is started anew for the loads after it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from compare_results import (
    OURS,
    START,
    START_FIGURE,
    TARGETS,
    Measured,
    Results,
    in_order,
    notes,
    read_results,
    rows,
    summary,
    write_results,
)
from compare_workloads import WORKLOADS, Source, WorkloadFailed, warm_up
from http_load import Client
from marked_block import write_block
from peer_models import prepare, vocab_size
from peers import PEERS, Models, Peer
from report import environment, environment_lines, publish, table

LOG_LINES = 12


class PeerFailed(Exception):
    """An engine did not start; the others go on."""


class LoadFailed(Exception):
    """A load has no numbers; the engine is started anew for the next one."""

    def __init__(self, load: str, why: str) -> None:
        super().__init__(why)
        self.load = load


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
            self.read()

    def read(self) -> int:
        """The peak, with what there is now."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += process.memory_full_info().pss
        self.peak = max(self.peak, total)
        return self.peak

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    start: float  # until an engine answers
    load: float  # of one load
    repeat: float  # a load that took longer is measured once


@dataclass(frozen=True, slots=True)
class Bench:
    """What all engines are measured with. run: commit, time and load average of this run."""

    models: Models
    root: Path
    precision: str
    workloads: tuple[str, ...]
    limits: Limits
    seed: int
    vocab_size: int
    run: str


class EngineRun:
    """One engine over the rounds of a run. ``found`` has what was measured, by load."""

    def __init__(self, peer: Peer, bench: Bench) -> None:
        self.found: dict[str, Measured] = {}
        self._peer, self._bench = peer, bench
        self._more: tuple[str, ...] = ()  # options with which it starts, where it does not with its defaults
        self._took: dict[str, float] = {}

    def measure(self) -> None:
        """One round: the loads that neither failed nor took too long for another one."""
        due = [name for name in self._bench.workloads if self._is_due(name)]
        while due and START not in self._failed():
            try:
                self._start(due)
            except PeerFailed as error:
                if not self._peer.fallback or self._more:
                    self._fail(START, str(error))
                    return
                self._more = self._peer.fallback
                note = f"with {' '.join(self._more)}, since with its defaults it {str(error).splitlines()[0]}"
                self._entry(START).note = note
                self._tell(note)

    def _is_due(self, name: str) -> bool:
        return name not in self._failed() and self._took.get(name, 0.0) <= self._bench.limits.repeat

    def _failed(self) -> set[str]:
        return {name for name, measured in self.found.items() if measured.failure is not None}

    def _start(self, due: list[str]) -> None:
        """Take loads off ``due`` until it is empty or one fails. Raises PeerFailed if the engine does not start."""
        begin = time.perf_counter()
        with self._running() as (url, process):
            memory = PeakMemory(process.pid)
            try:
                asyncio.run(self._loads(url, begin, memory, due))
            except LoadFailed as error:
                ended = "" if process.poll() is None else f"its process ended with status {process.poll()}\n{self._tail()}"
                self._fail(error.load, ended or str(error))
            finally:
                memory.stop()

    async def _loads(self, url: str, begin: float, memory: PeakMemory, due: list[str]) -> None:
        bench = self._bench
        client = Client(url, self._peer.backend(), headers={}, timeout=bench.limits.load, keep_alive=False)
        try:
            first = await client.send(list(range(100, 132)), 4)  # a first token may end inside a character, which some send later
            if first.error is not None:
                raise PeerFailed(f"did not answer its first request: {first.error}: {first.message}\n{self._tail()}")
            self._add(START, {START_FIGURE: time.perf_counter() - begin}, memory)
            try:
                await warm_up(client, Source(bench.seed + 1, bench.vocab_size))
            except WorkloadFailed as error:
                raise PeerFailed(f"did not answer the warm-up: {error}\n{self._tail()}") from None
            while due:
                await self._load(client, due.pop(0), memory)
        finally:
            await client.close()

    async def _load(self, client: Client, name: str, memory: PeakMemory) -> None:
        bench = self._bench
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(bench.limits.load):
                figures = await WORKLOADS[name](client, Source(bench.seed, bench.vocab_size))
        except WorkloadFailed as error:
            raise LoadFailed(name, str(error)) from None
        except TimeoutError:
            raise LoadFailed(name, f"given up after {bench.limits.load:.0f} s") from None
        self._took[name] = time.perf_counter() - begin
        self._add(name, figures.seconds, memory)
        self._entry(name).outputs = figures.outputs

    def _entry(self, name: str) -> Measured:
        return self.found.setdefault(name, Measured(run=self._bench.run))

    def _add(self, name: str, seconds: dict[str, float], memory: PeakMemory) -> None:
        entry = self._entry(name)
        for figure, value in seconds.items():
            entry.figures.setdefault(figure, []).append(value)
            self._tell(f"{figure}: {value:.4f} s")
        entry.peak = max(entry.peak, float(memory.read()))

    def _fail(self, name: str, why: str) -> None:
        self._entry(name).failure = why
        self._tell(f"{name}: {why}")

    def _tell(self, text: str) -> None:
        print(f"{self._peer.name}: {text}", file=sys.stderr, flush=True)

    @property
    def _log(self) -> Path:
        return self._bench.root / f"{self._peer.name}.log"

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    @contextlib.contextmanager
    def _running(self) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
        """(base URL, process) of the engine, which answers its health route. Raises PeerFailed with the end of its log."""
        peer, bench = self._peer, self._bench
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [*peer.command(peer.python(bench.root), bench.models, bench.precision, port), *self._more]
        environment = {**os.environ, **peer.environment}
        with self._log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            self._wait(process, f"http://127.0.0.1:{port}{peer.health}")
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait(self, process: subprocess.Popen[bytes], url: str) -> None:
        end = time.monotonic() + self._bench.limits.start
        while time.monotonic() < end:
            if (status := process.poll()) is not None:
                raise PeerFailed(f"ended with status {status} instead of starting\n{self._tail()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise PeerFailed(f"did not start in {self._bench.limits.start:.0f} s\n{self._tail()}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(PEERS), help=f"of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of {', '.join(WORKLOADS)} (default: all)")
    parser.add_argument("--precision", choices=list(TARGETS), default="bf16", help="of the weights (default: bf16)")
    parser.add_argument("--rounds", type=int, default=2, help="times that each engine is started and measured (default: 2)")
    parser.add_argument("--model", default="smollm2", choices=["smollm2"], help="whose weights (default: smollm2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-timeout", type=float, default=420, help="seconds until an engine must answer (default: 420)")
    parser.add_argument("--load-timeout", type=float, default=400, help="seconds that a load may take (default: 400)")
    parser.add_argument(
        "--repeat-under",
        type=float,
        default=60,
        help="seconds: a load that took longer is measured in one round only (default: 60)",
    )
    parser.add_argument("--root", type=Path, default=Path.home() / ".cache" / "banyan" / "peers", help="environments and weights")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before in this precision")
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
    kept = args.root / f"results-{args.model}-{args.precision}-{args.seed}.json"
    facts = environment()
    results: Results = {} if args.fresh else read_results(kept)
    for name, found in _run(args, facts):
        results[name] = results.get(name, {}) | found
        write_results(kept, results)
    results = in_order(results, list(PEERS))
    facts["versions"] |= {name: PEERS[name].version(args.root) for name in results if PEERS[name].packages}
    head = [args.precision, *results, "ours / best other", "target"]
    lines = rows(results, args.precision)
    setting = {"model": args.model, "precision": args.precision, "rounds": args.rounds, "seed": args.seed}
    report: dict[str, Any] = {"environment": facts, "setting": setting, "result": summary(results)}
    publish(report, head, lines, args.json)
    below = notes(results)
    print("\n" + "\n".join(below), flush=True)
    if args.write is not None:
        text = "\n".join([*environment_lines(facts), *below])
        write_block(args.write, f"compare-{args.precision}", f"{table(head, lines)}\n\n```text\n{text}\n```\n")
    return 1 if any(measured.failure for measured in results.get(OURS, {}).values()) else 0


def _run(args: argparse.Namespace, facts: dict[str, Any]) -> Iterator[tuple[str, dict[str, Measured]]]:
    """After each turn of an engine: its name, and what it has come to so far."""
    if not args.rounds:
        return
    models = prepare(args.model, args.root)
    peers = [PEERS[name] for name in args.engines]
    for peer in peers:
        peer.install(args.root)
    bench = Bench(
        models=models,
        root=args.root,
        precision=args.precision,
        workloads=tuple(args.workloads),
        limits=Limits(args.start_timeout, args.load_timeout, args.repeat_under),
        seed=args.seed,
        vocab_size=vocab_size(models),
        run=f"commit {facts['commit']}, {facts['date']}, load average {facts['machine']['load_average']} at start",
    )
    runs = {peer.name: EngineRun(peer, bench) for peer in peers}
    for _ in range(args.rounds):
        for name, run in runs.items():
            run.measure()
            yield name, run.found


if __name__ == "__main__":
    sys.exit(main())
