"""A long prompt arrives while streams decode: the worst gap between two tokens of a stream, and what the prompt pays for it.

    python benchmarks/bench_itl.py [--model-path smollm2] [--streams 4] [--prompt 4096] [--target-itl-ms 150] [--json FILE]

Each setting gets a server of its own: prompts first, mixed chunks, a target inter-token latency, and the default.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
from http_load import events
from report import environment, number, publish
from server_process import running_server

WARM_TOKENS = 8  # of each stream before the long prompt arrives


class Stream:
    """One request; when each of its events arrived."""

    def __init__(self, http: httpx.AsyncClient, input_ids: list[int], num_new: int) -> None:
        params = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
        self._http = http
        self._body = {"input_ids": input_ids, "sampling_params": params, "stream": True, "incremental": True}
        self.times: list[float] = []
        self.start = 0.0

    async def run(self) -> None:
        self.start = time.perf_counter()
        async with self._http.stream("POST", "/generate", json=self._body) as reply:
            reply.raise_for_status()
            async for now, event in events(reply.aiter_raw()):
                if event != b"[DONE]" and msgspec.json.decode(event)["output_ids"]:
                    self.times.append(now)


async def measure(url: str, args: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(0)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await Stream(http, rng.integers(10, 40000, 64).tolist(), 16).run()
        streams = [Stream(http, rng.integers(10, 40000, 32).tolist(), args.tokens) for _ in range(args.streams)]
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        while min(len(stream.times) for stream in streams) < WARM_TOKENS:
            await asyncio.sleep(0.01)
        prompt = Stream(http, rng.integers(10, 40000, args.prompt).tolist(), 2)
        await prompt.run()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first = prompt.times[0]
    gaps = [
        (after - before) * 1e3
        for stream in streams
        for before, after in zip(stream.times, stream.times[1:], strict=False)
        if prompt.start <= after <= first + 1
    ]
    before = [gap for stream in streams for gap in np.diff([t for t in stream.times if t < prompt.start]) * 1e3]
    return {
        "itl_before_p50_ms": float(np.median(before)),
        "itl_p50_ms": float(np.median(gaps)),
        "itl_p99_ms": float(np.percentile(gaps, 99)),
        "itl_worst_ms": max(gaps),
        "ttft_of_prompt_s": first - prompt.start,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--target-itl-ms", type=float, default=150)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    facts = environment()
    settings = {
        "prompts first": ["--target-itl-ms", "0"],
        "mixed chunks": ["--enable-mixed-chunk"],
        f"target {args.target_itl_ms:g} ms": ["--target-itl-ms", str(args.target_itl_ms)],
        "default": [],
    }
    results: dict[str, dict[str, Any]] = {}
    for name, options in settings.items():
        options = [*options, "--load-format", args.load_format, "--log-level", "warning"]
        with running_server(args.model_path, options, start_timeout=300) as url:
            results[name] = asyncio.run(measure(url, args))
    keys = list(next(iter(results.values())))
    rows = [[name, *(number(result[key]) for key in keys)] for name, result in results.items()]
    setting = {"model": args.model_path, "streams": args.streams, "prompt": args.prompt, "target_itl_ms": args.target_itl_ms}
    publish({"environment": facts, "setting": setting, "result": results}, ["setting", *keys], rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
