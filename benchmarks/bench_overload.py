"""A server at twice the rate it can sustain: is the queue bounded, is refusal quick, is nothing lost, is memory flat?

    python benchmarks/bench_overload.py [--requests 10000] [--json FILE]

The token oracle stands in for the model, so what is measured is the engine. First a closed loop finds the sustainable rate; then an
open loop sends requests at twice that rate, evenly spaced. Server and load generator share the machine: the generator writes raw
HTTP over a few hundred kept connections to cost as little as it can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import psutil
from report import environment, number, publish
from server_process import running_server

OUTPUT_TOKENS = 16
RUNNING, QUEUED = 16, 32
CONNECTIONS = 256
CALIBRATION = 1500  # requests of the closed loop


class Connection:
    """One kept HTTP/1.1 connection."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the reply."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        reply = await reader.readexactly(int(fields.get("content-length", 0)))
        if fields.get("connection") == "close":
            await self.close()
        return int(lines[0].split()[1]), reply

    async def close(self) -> None:
        if self._streams:
            self._streams[1].close()
            self._streams = None


class Load:
    """Sends requests and keeps (status, seconds) of each."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.results: list[tuple[int, float]] = []
        self._free: asyncio.Queue[Connection] = asyncio.Queue()
        for _ in range(CONNECTIONS):
            self._free.put_nowait(Connection(host, int(port)))
        self._rng = np.random.default_rng(0)

    async def one(self) -> None:
        """One request on a free connection; -1 stands for a broken one."""
        ids = self._rng.integers(10, 1000, 32).tolist()
        body = json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}}).encode()
        connection = await self._free.get()
        start = time.perf_counter()
        try:
            status, _ = await connection.post("/generate", body)
        except (OSError, asyncio.IncompleteReadError):
            status = -1
            await connection.close()
        self.results.append((status, time.perf_counter() - start))
        self._free.put_nowait(connection)

    async def closed(self, total: int, concurrency: int) -> float:
        """Requests per second with so many always under way."""
        left = iter(range(total))

        async def work() -> None:
            for _ in left:
                await self.one()

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return total / (time.perf_counter() - start)

    async def open(self, total: int, rate: float) -> float:
        """Send ``total`` evenly spaced; the rate that was reached."""
        start = time.perf_counter()
        tasks = []
        for index in range(total):
            await asyncio.sleep(max(start + index / rate - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(self.one()))
        sent = time.perf_counter() - start
        await asyncio.gather(*tasks)
        return total / sent

    async def close(self) -> None:
        while not self._free.empty():
            await self._free.get_nowait().close()


def rss_mib() -> float:
    """Memory of the server's processes, MiB."""
    children = psutil.Process().children(recursive=True)
    return sum(child.memory_info().rss for child in children) / 2**20


async def measure(url: str, total: int) -> dict[str, Any]:
    load = Load(url)
    rate = await load.closed(CALIBRATION, RUNNING)
    load.results.clear()
    before = rss_mib()
    reached = await load.open(total, 2 * rate)
    after = rss_mib()
    await load.close()
    state = httpx.get(url + "/server_info", timeout=30).json()["internal_states"][0]
    statuses = Counter(status for status, _ in load.results)
    refused = [seconds * 1e3 for status, seconds in load.results if status == 503]
    served = [seconds * 1e3 for status, seconds in load.results if status == 200]
    return {
        "sustainable_rate": rate,
        "offered_rate": reached,
        "sent": total,
        "answered": len(load.results),
        "served": statuses[200],
        "refused": statuses[503],
        "other": total - statuses[200] - statuses[503],
        "refused_ms_p50": float(np.percentile(refused, 50)) if refused else None,
        "refused_ms_p99": float(np.percentile(refused, 99)) if refused else None,
        "served_ms_p99": float(np.percentile(served, 99)) if served else None,
        "rss_growth_mib": after - before,
        "left_running": state["num_running_reqs"] + state["num_waiting_reqs"],
        "memory_balanced": state["memory_balanced"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    options = ["--load-format", "oracle", "--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED)]
    setting = {"running": RUNNING, "queued": QUEUED, "output_tokens": OUTPUT_TOKENS, "connections": CONNECTIONS}
    facts = environment()
    with running_server("smollm2", [*options, "--log-level", "warning"], start_timeout=120) as url:
        result = asyncio.run(measure(url, args.requests))
    rows = [[name, number(value)] for name, value in result.items()]
    publish({"environment": facts, "setting": setting, "result": result}, ["overload", "value"], rows, args.json)
    return 0 if result["other"] == 0 and result["left_running"] == 0 and result["memory_balanced"] else 1


if __name__ == "__main__":
    sys.exit(main())
