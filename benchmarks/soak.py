"""A mixed load for many minutes: nothing may be wrong, leak or grow. ``make soak`` runs 20 minutes of it.

Prompts of all lengths with shared prefixes, streams, JSON schemas, sessions; a fifth of the requests is aborted or hung up on;
the server retracts requests and fails allocations on purpose. Every greedy answer must be the one that was given before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from server import Server, oracle_folder, until

KINDS = {"plain": 30, "stream": 20, "schema": 10, "session": 10, "hang_up": 10, "abort": 10, "batch": 10}
FAULTS = "retract_every=97,alloc_fail=0.01"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SAMPLE = 2.0  # seconds between two looks at the processes
RSS_GROWTH, FD_GROWTH, THREAD_GROWTH = 0.05, 4.0, 2.0  # over the time after the warm-up; RSS as a share
ERRORS = 2.0  # standard errors of a slope that are no growth: connections come and go
P99_RATIO, COST_RATIO = 3.0, 1.5  # of the last third to the middle third
WINDOWS = 5  # of each third
YARDSTICK = 30_000  # steps of a loop that takes about a millisecond
YARDSTICK_INTERVAL = 0.05


class Sample(NamedTuple):
    """A look at the processes: when, their memory, descriptors and threads, and CPU seconds and requests so far."""

    when: float
    rss: float
    fds: int
    threads: int
    cpu: float
    requests: int


class Soak:
    """One run against one server."""

    def __init__(self, server: Server, *, seconds: float, clients: int, seed: int) -> None:
        self.server = server
        self.end = time.monotonic() + seconds
        self.clients = clients
        self.seed = seed
        self.known: dict[str, list[int]] = {}
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.latencies: list[tuple[float, float]] = []  # when, seconds
        self.samples: list[Sample] = []
        self.yardstick: list[tuple[float, float]] = []  # when, seconds that a loop took which is always the same

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=limits) as http:
            watches = [asyncio.create_task(self._watch()), asyncio.create_task(self._measure_the_machine())]
            await asyncio.gather(*[self._client(http, random.Random(self.seed + number)) for number in range(self.clients)])
            for watch in watches:
                watch.cancel()
            for end in await asyncio.gather(*watches, return_exceptions=True):
                if not isinstance(end, asyncio.CancelledError):
                    raise end or RuntimeError("a watch ended early")

    async def _client(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        while time.monotonic() < self.end:
            (kind,) = draw.choices(list(KINDS), weights=list(KINDS.values()))
            try:
                await getattr(self, "_" + kind)(http, draw)
            except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            self.counts[kind] += 1

    def _body(self, draw: random.Random) -> dict[str, Any]:
        shared = "You are helpful. " * draw.choice([1, 1, 4, 20])
        text = shared + f"question {draw.randrange(12)}" + " and more" * draw.choice([0, 1, 9, 60])
        params = {"temperature": 0, "max_new_tokens": draw.choice([1, 4, 16, 64]), "ignore_eos": True}
        return {"text": text, "sampling_params": params}

    def _check(self, body: dict[str, Any], ids: list[int]) -> None:
        expected = self.known.setdefault(json.dumps(body, sort_keys=True), ids)
        assert ids == expected, "another answer than before"

    async def _plain(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        body, begin = self._body(draw), time.monotonic()
        reply = await http.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        now = time.monotonic()
        self.latencies.append((now, (now - begin) / body["sampling_params"]["max_new_tokens"]))
        self._check(body, reply.json()["output_ids"])

    async def _batch(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        bodies = [self._body(draw) for _ in range(3)]
        whole = {key: [body[key] for body in bodies] for key in bodies[0]}
        reply = await http.post("/generate", json=whole)
        assert reply.status_code == 200, reply.text
        for body, item in zip(bodies, reply.json(), strict=True):
            self._check(body, item["output_ids"])

    async def _stream(self, http: httpx.AsyncClient, draw: random.Random, stop_after: int | None = None) -> None:
        body = self._body(draw)
        ids: list[int] = []
        async with http.stream("POST", "/generate", json={**body, "stream": True}) as reply:
            assert reply.status_code == 200
            number = 0
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    ids = json.loads(line[6:])["output_ids"]
                    number += 1
                if stop_after is not None and number >= stop_after:
                    return  # the client goes
        self._check(body, ids)

    async def _hang_up(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        await self._stream(http, draw, stop_after=draw.choice([0, 1, 3]))

    async def _abort(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        body, rid = self._body(draw), uuid.uuid4().hex
        asked = asyncio.create_task(http.post("/generate", json={**body, "rid": rid}))
        await asyncio.sleep(draw.random() * 0.05)
        await http.post("/abort_request", json={"rid": rid})
        reply = await asked
        assert reply.status_code == 200, reply.text
        item = reply.json()
        if item["meta_info"]["finish_reason"]["type"] != "abort":
            self._check(body, item["output_ids"])

    async def _schema(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        params = {"temperature": 0, "max_new_tokens": 24, "json_schema": json.dumps(SCHEMA)}
        reply = await http.post("/generate", json={"text": f"json {draw.randrange(5)}", "sampling_params": params})
        assert reply.status_code == 200, reply.text
        item = reply.json()
        if item["meta_info"]["finish_reason"]["type"] == "stop":
            assert isinstance(json.loads(item["text"])["a"], int)
        self._check({"schema": reply.request.content.decode()}, item["output_ids"])

    async def _session(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        session = (await http.post("/open_session", json={"capacity_of_str_len": 4000})).json()
        texts, rid = [f"hello {draw.randrange(4)}", " and then", " at last"], None
        for turn, text in enumerate(texts):
            params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
            body = {"text": text, "sampling_params": params, "session_params": {"id": session, "rid": rid}}
            reply = await http.post("/generate", json=body)
            assert reply.status_code == 200, reply.text
            rid = reply.json()["meta_info"]["id"]
            self._check({"session": texts[: turn + 1]}, reply.json()["output_ids"])
        assert (await http.post("/close_session", json={"session_id": session})).status_code == 200

    async def _watch(self) -> None:
        while True:
            own = psutil.Process(self.server.process.pid)
            looks = [look for process in [own, *own.children(recursive=True)] if (look := look_at(process))]
            rss, fds, threads, cpu = (sum(values) for values in zip(*looks, strict=True))
            self.samples.append(Sample(time.monotonic(), rss, int(fds), int(threads), cpu, self.counts.total()))
            await asyncio.sleep(SAMPLE)

    async def _measure_the_machine(self) -> None:
        """How long others keep this process off its core: what a tail of latencies must be compared with."""
        while True:
            begin = time.perf_counter()
            for _ in range(YARDSTICK):
                pass
            self.yardstick.append((time.monotonic(), time.perf_counter() - begin))
            await asyncio.sleep(YARDSTICK_INTERVAL)

    # --- judgement

    def faults(self) -> list[str]:
        """What went wrong; empty if nothing did."""
        found = [f"{len(self.wrong)} wrong: {self.wrong[0]}"] if self.wrong else []
        rss, fds, threads = (self.least_growth(column) for column in ("rss", "fds", "threads"))
        mean = statistics.fmean(sample.rss for sample in self.samples)
        found += [f"RSS grows by {rss / 1e6:.1f} MB"] if rss > RSS_GROWTH * mean else []
        found += [f"descriptors grow by {fds:.1f}"] if fds > FD_GROWTH else []
        found += [f"threads grow by {threads:.1f}"] if threads > THREAD_GROWTH else []
        before, after = self.p99(1), self.p99(2)
        slower = max(self.p99(2, self.yardstick) / max(self.p99(1, self.yardstick), 1e-9), 1.0)
        grown = f"p99 grows from {before * 1e3:.1f} to {after * 1e3:.1f} ms per token, on a machine {slower:.1f} times as slow"
        found += [grown] if after > P99_RATIO * slower * before else []
        before, after = self.cost(1), self.cost(2)
        grown = f"a request costs {after * 1e3:.1f} ms of CPU time, {before * 1e3:.1f} before"
        found += [grown] if after > COST_RATIO * before else []
        return found

    def growth(self, column: str) -> float:
        """What the regression line rises by over the last two thirds of the run: the first third is the warm-up."""
        return self._rise(column)[0]

    def least_growth(self, column: str) -> float:
        """What is left of the growth without what chance explains."""
        rise, error = self._rise(column)
        return rise - ERRORS * error

    def _rise(self, column: str) -> tuple[float, float]:
        kept = self.samples[len(self.samples) // 3 :]
        times, values = [sample.when for sample in kept], [float(getattr(sample, column)) for sample in kept]
        if len(set(times)) < 3:
            return 0.0, 0.0
        slope, intercept = statistics.linear_regression(times, values)
        rest = sum((value - slope * when - intercept) ** 2 for when, value in zip(times, values, strict=True)) / (len(times) - 2)
        middle = statistics.fmean(times)
        error = (rest / sum((when - middle) ** 2 for when in times)) ** 0.5
        length = times[-1] - times[0]
        return slope * length, error * length

    def _part(self, when: float, parts: int) -> int:
        """Which of so many equal parts of the run it was in."""
        begin = self.samples[0].when
        return int((when - begin) * parts / (self.end - begin))

    def p99(self, third: int, timed: list[tuple[float, float]] | None = None) -> float:
        """Of what ended in a third of the run; by default of seconds per token of plain requests.

        It is the median of those of its windows: one stall of the machine hits all clients at once, but one window only.
        """
        windows: dict[int, list[float]] = {}
        for when, seconds in self.latencies if timed is None else timed:
            windows.setdefault(self._part(when, 3 * WINDOWS), []).append(seconds)
        found = [sorted(windows.get(number, ())) for number in range(third * WINDOWS, (third + 1) * WINDOWS)]
        tails = [values[min(int(len(values) * 0.99), len(values) - 1)] for values in found if values]
        return statistics.median(tails) if tails else 0.0

    def cost(self, third: int) -> float:
        """CPU seconds per request in a third of the run; others on the machine have no part in it."""
        kept = [sample for sample in self.samples if self._part(sample.when, 3) == third]
        requests = kept[-1].requests - kept[0].requests if kept else 0
        return (kept[-1].cpu - kept[0].cpu) / requests if requests else 0.0

    def report(self) -> dict[str, Any]:
        """Numbers of the run."""
        return {
            "requests": dict(self.counts),
            "distinct_answers": len(self.known),
            "wrong": len(self.wrong),
            "rss_mb": round(self.samples[-1].rss / 1e6, 1),
            "rss_growth_mb": round(self.growth("rss") / 1e6, 2),
            "fd_growth": round(self.growth("fds"), 2),
            "thread_growth": round(self.growth("threads"), 2),
            "p99_ms_per_token": [round(self.p99(third) * 1e3, 2) for third in range(3)],
            "p99_ms_of_a_loop": [round(self.p99(third, self.yardstick) * 1e3, 2) for third in range(3)],
            "cpu_ms_per_request": [round(self.cost(third) * 1e3, 2) for third in range(3)],
        }


def look_at(process: psutil.Process) -> tuple[float, float, float, float] | None:
    """Memory, descriptors, threads and CPU seconds of a process; None if it has just ended."""
    try:
        times = process.cpu_times()
        return float(process.memory_info().rss), process.num_fds(), process.num_threads(), times.user + times.system
    except psutil.NoSuchProcess:
        return None


def main() -> int:
    """Run; 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a real model; default: the token oracle")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or oracle_folder(Path(folder) / "model")
        more = ("--max-total-tokens", "4000", "--max-running-requests", "8", "--enable-metrics", "--restart-budget", "0")
        load_format = "auto" if options.model else "oracle"
        server = Server(model, Path(folder) / "run", *more, faults=FAULTS, load_format=load_format)
        try:
            server.wait_ready()
            soak = Soak(server, seconds=options.minutes * 60, clients=options.clients, seed=options.seed)
            asyncio.run(soak.run())
            until(server.at_rest)
            faults, report = soak.faults(), soak.report()
            server.terminate()
        finally:
            server.close()
    print(json.dumps(report) if options.json else "\n".join(f"{name:18} {value}" for name, value in report.items()))
    for fault in faults:
        print(f"FAULT: {fault}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
