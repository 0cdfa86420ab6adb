"""What ranks cost and bring: tokens per second of a model with one rank, two tensor-parallel ranks and two stages, one thread each;
and what it costs rank 0's host per turn to hand its messages on.

    .venv/bin/python benchmarks/bench_ranks.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from report import environment, environment_lines

from banyan import Engine
from banyan.managers.inbox import FollowerInbox, LeaderInbox
from banyan.managers.io_struct import GenerateReq, Tick, pack_ids
from banyan.managers.sampling_params import SamplingParams

SHAPES: dict[str, dict[str, int]] = {"one rank": {}, "tp 2": {"tp_size": 2}, "pp 2": {"pp_size": 2}}


class Arrivals:
    """What rank 0 receives: in every tenth turn a request."""

    def __init__(self, prompt_len: int) -> None:
        ids = pack_ids(np.arange(prompt_len) % 1000)
        self._request = GenerateReq(rid="r", input_ids=ids, sampling_params=SamplingParams())
        self._turn = 0

    def wait(self, timeout: float) -> bool:
        return True

    def take(self, own: Any) -> list[Any]:
        self._turn += 1
        return [*own(), self._request] if self._turn % 10 == 0 else own()


def broadcast_cost(size: int, turns: int, prompt_len: int) -> tuple[float, float]:
    """Microseconds per turn, medians: CPU time of rank 0's host, and until the slowest other rank has the messages."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{folder}/turns"
        leader = LeaderInbox(Arrivals(prompt_len), context, address, "", size)  # type: ignore[arg-type]
        arrived = [0.0] * size

        def follow(rank: int) -> None:
            own = zmq.Context()
            inbox = FollowerInbox(own, address, "", rank)
            inbox.meet({})
            delays = []
            for _ in range(turns):
                (tick, *_rest) = inbox.take(list)
                delays.append(time.perf_counter() - tick.now)
            arrived[rank] = statistics.median(delays)
            own.destroy(linger=0)

        threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        leader.meet({})
        costs = []
        for _ in range(turns):
            before = time.thread_time()
            leader.take(lambda: [Tick(now=time.perf_counter())])
            costs.append(time.thread_time() - before)
            time.sleep(0.0005)
        for thread in threads:
            thread.join()
        context.destroy(linger=0)
        return statistics.median(costs) * 1e6, max(arrived) * 1e6


def throughput(model: str, shape: dict[str, int], args: argparse.Namespace) -> tuple[float, float]:
    """Prompt and output tokens per second."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 1000, args.input_len).tolist() for _ in range(args.num_prompts)]
    greedy = {"temperature": 0, "ignore_eos": True}
    with Engine(model_path=model, dtype=args.dtype, max_total_tokens=args.slots, disable_radix_cache=True, **shape) as engine:
        engine.generate(input_ids=prompts[:1], sampling_params={**greedy, "max_new_tokens": 4})
        begin = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params={**greedy, "max_new_tokens": 1})
        prefill = time.perf_counter() - begin
        begin = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params={**greedy, "max_new_tokens": args.output_len})
        decode = time.perf_counter() - begin - prefill
    return args.num_prompts * args.input_len / prefill, args.num_prompts * (args.output_len - 1) / max(decode, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = environment()
    print("\n".join(environment_lines(facts)), end="\n\n")
    results: dict[str, Any] = {"environment": facts, "broadcast": {}, "throughput": {}}
    print("| ranks | CPU time of rank 0's host, us per turn | until all have it, us |\n|---|---|---|")
    for size in (2, 4, 8):
        host, arrival = broadcast_cost(size, args.turns, args.input_len)
        results["broadcast"][size] = {"host_us": host, "arrival_us": arrival}
        print(f"| {size} | {host:.1f} | {arrival:.0f} |")
    print("\n| ranks, one thread each | prompt tokens/s | output tokens/s |\n|---|---|---|")
    for name, shape in SHAPES.items():
        prefill, decode = throughput(args.model_path, shape, args)
        results["throughput"][name] = {"prompt_tokens_per_s": prefill, "output_tokens_per_s": decode}
        print(f"| {name} | {prefill:.0f} | {decode:.1f} |")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
