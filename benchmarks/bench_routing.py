"""What each way to route requests to replicas reuses, and how evenly it loads them, on a multi-turn trace.

    python benchmarks/bench_routing.py [--replicas N ...] [--method NAME ...] [--write docs/parallelism.md]

Each replica is the real scheduler, radix tree and allocator of bench_policies, with the router that the controller of replicas uses
before them; time is simulated by the same cost of a step. The trace is chat about documents: a conversation begins with one of the
system prompts and a document of its own, and comes back after a while of thinking, so that what the others do in between
decides whether its prefix is still there. ``--fit`` is the size of all caches together over the tokens of the conversations
that are open at the same time: below 1 a prefix that is kept twice drives another one out, above 2 nothing is ever driven out.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_policies import Ask, Simulation, StepCost
from marked_block import write_block
from policy_traces import VOCAB, Conversation, Trace

from banyan.managers.data_parallel.routing import METHODS, Load, Router
from banyan.managers.io_struct import TokenOutput, pack_ids

BLOCK = "bench_routing"
OUTPUT_LEN = 16
OPTIONS = {"page_size": 1, "chunked_prefill_size": 512}
HEAD = ("replicas", "fit", "method", "prompt tokens reused", "of round_robin's", "busiest over mean", "TTFT p50, s", "TTFT p99, s")


def chat_trace(seed: int, num_conversations: int, *, period: float) -> Trace:
    """Conversations of 2 turns and more, 3.5 on average, one beginning every ``period`` seconds; three system prompts of 200
    tokens, documents of 300 to 900, questions of 40 to 160, answers of 16, 5 to 25 s between an answer and the next question.

    num_slots: the tokens of those that are open at the same time, 90th percentile.
    """
    rng = np.random.default_rng(seed)
    systems = [rng.integers(3, VOCAB, 200).astype(np.int32) for _ in range(3)]
    conversations, spans = [], []
    start = 0.0
    for index in range(num_conversations):
        start += float(rng.exponential(period))
        turns = [rng.integers(3, VOCAB, int(rng.integers(40, 161))).astype(np.int32) for _ in range(1 + int(rng.geometric(0.4)))]
        document = rng.integers(3, VOCAB, int(rng.integers(300, 901))).astype(np.int32)
        turns[0] = np.concatenate([systems[int(rng.integers(3))], document, turns[0]])
        think = float(rng.uniform(5, 25))
        size = sum(len(turn) + OUTPUT_LEN for turn in turns)
        spans.append((start, start + (think + 2) * len(turns), size))
        conversations.append(
            Conversation(start=start, turns=tuple(turns), max_new_tokens=OUTPUT_LEN, think=think, key=f"chat-{index}")
        )
    times = np.linspace(0, start, 200)
    open_tokens = [sum(size for begin, end, size in spans if begin <= time < end) for time in times]
    return Trace(name="chat", conversations=conversations, num_slots=int(np.percentile(open_tokens, 90)))


class Fleet:
    """Replicas behind one router; the next thing to happen anywhere happens next."""

    def __init__(self, trace: Trace, method: str, size: int, *, fit: float) -> None:
        slots = int(trace.num_slots * fit / size)
        empty = replace(trace, conversations=[], num_slots=slots)
        self.router = Router(method, [Load() for _ in range(size)], slots)
        self.replicas = [FleetReplica(self, index, empty) for index in range(size)]
        self.arrivals: list[tuple[float, int, Ask]] = []
        self._count = itertools.count()
        for conversation in trace.conversations:
            self.later(Ask(conversation, 0, conversation.turns[0], conversation.start))

    def later(self, ask: Ask) -> None:
        heapq.heappush(self.arrivals, (ask.arrived, next(self._count), ask))

    def run(self) -> None:
        while True:
            busy = [replica for replica in self.replicas if not replica.scheduler.is_idle()]
            if not busy and not self.arrivals:
                return
            first = min(busy, key=lambda replica: replica.clock.now, default=None)
            if first is None or (self.arrivals and self.arrivals[0][0] <= first.clock.now):
                self._route(heapq.heappop(self.arrivals)[2])
            else:
                first.loop.turn()

    def _route(self, ask: Ask) -> None:
        index = self.router.route(f"r{id(ask)}", pack_ids(ask.prompt), OUTPUT_LEN)
        if index is None:
            raise RuntimeError("no replica is up")
        replica = self.replicas[index]
        if replica.scheduler.is_idle():
            replica.clock.now = max(replica.clock.now, ask.arrived)
        replica.submit(ask)

    def summary(self) -> dict[str, float]:
        """Tokens reused, their share of all prompts, the busiest replica's computed tokens over the mean, and times in seconds."""
        by_replica = [list(replica.asks.values()) for replica in self.replicas]
        asks = list(itertools.chain.from_iterable(by_replica))
        loads = [sum(len(ask.prompt) - ask.cached + len(ask.output) for ask in own) for own in by_replica]
        ttfts = [ask.ttft for ask in asks]
        reused = sum(ask.cached for ask in asks)
        return {
            "reused_tokens": reused,
            "reused": reused / sum(len(ask.prompt) for ask in asks),
            "imbalance": max(loads) / (sum(loads) / len(loads)),
            "ttft_p50": float(np.percentile(ttfts, 50)),
            "ttft_p99": float(np.percentile(ttfts, 99)),
        }


class FleetReplica(Simulation):
    """A replica: what arrives is decided by the fleet."""

    def __init__(self, fleet: Fleet, index: int, trace: Trace) -> None:
        self._fleet = fleet
        super().__init__(trace, "fcfs", StepCost(), OPTIONS)

    def submit(self, ask: Ask) -> None:
        self._submit(ask)

    def _receive(self, in_flight: bool) -> None:
        """Nothing comes by itself."""

    def _later(self, ask: Ask) -> None:
        self._fleet.later(ask)

    def _take(self, output: TokenOutput) -> None:
        super()._take(output)
        for rid, reason in zip(output.rids, output.finish_reasons, strict=True):
            if reason is not None:
                self._fleet.router.ended(f"r{id(self.asks[rid])}")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of replicas, fit and method. More replicas get as many more conversations."""
    rows: list[dict[str, Any]] = []
    for size, fit in itertools.product(args.replicas, args.fit):
        trace = chat_trace(args.seed, args.conversations * size, period=args.period / size)
        for method in args.method:
            fleet = Fleet(trace, method, size, fit=fit)
            fleet.run()
            rows.append({"replicas": size, "fit": fit, "method": method, **fleet.summary()})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [" | ".join(HEAD), " | ".join(["---:", "---:", "---", *["---:"] * (len(HEAD) - 3)])]
    blind = {(row["replicas"], row["fit"]): row["reused_tokens"] for row in rows if row["method"] == "round_robin"}
    for row in rows:
        base = blind.get((row["replicas"], row["fit"]))
        ratio = f"{row['reused_tokens'] / base:.2f}" if base else ""
        shown = (
            f"{100 * row['reused']:.1f} %",
            ratio,
            f"{row['imbalance']:.2f}",
            f"{row['ttft_p50']:.2f}",
            f"{row['ttft_p99']:.2f}",
        )
        lines.append(" | ".join((str(row["replicas"]), f"{row['fit']:g}", row["method"], *shown)))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = [method for method in METHODS if method != "follow_bootstrap_room"]
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--method", nargs="+", choices=methods, default=["round_robin", "total_tokens", "cache_aware"])
    parser.add_argument("--conversations", type=int, default=25, help="for each replica (default: 25)")
    parser.add_argument("--period", type=float, default=6.0, help="seconds between two that begin, for each replica (default: 6)")
    parser.add_argument(
        "--fit", nargs="+", type=float, default=[0.6, 4], help="sizes of all caches over the open conversations (default: 0.6 4)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="put the table into the marked block of this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = parse(argv)
    results = measure(args)
    text = table(results)
    print(text, end="")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.write:
        write_block(args.write, BLOCK, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
