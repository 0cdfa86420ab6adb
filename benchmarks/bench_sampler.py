"""Sampling alone: the native library beside torch, in turns, on logits as they leave a model.

    python benchmarks/bench_sampler.py
    OMP_NUM_THREADS=1 python benchmarks/bench_sampler.py --clock cpu --rows 1,32 --vocab-sizes 262144 --repeats 30

Logits are synthetic: normal with a standard deviation of 2.5 and 40 ids raised by 6 to 12, as where a model is fairly sure
("peaked"), or with a deviation of 1 and no more ("flat": most draws fall behind the best thousand). Both candidates choose for
the same rows and must agree; ``us`` are microseconds a row, the median and the least of the repeats; the ratio is that of medians.
``--clock cpu`` takes the process's CPU time, which programs beside it disturb less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from native_bench import begin, make_parser, numbers, setting
from report import environment, number, publish

from banyan.layers.kernels.cpu.library import Native
from banyan.layers.sampler import sample
from banyan.layers.sampling_input import TOP_K_ALL, SamplingInput

CASES: dict[str, dict[str, float]] = {
    "temperature 1": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "all three": {"temperature": 0.7, "top_k": 100, "top_p": 0.95, "min_p": 0.02},
    "greedy": {"temperature": 0.0},
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
HEAD = ("parameters", "logits", "vocabulary", "rows", "torch, us", "best", "native, us", "best", "native / torch")


def main() -> int:
    """Run; the exit status: 1 where ids differ."""
    args, native = begin(_parser())
    facts = environment()
    results = [
        _measure(native, args, case=case, shape=shape, vocab_size=vocab_size, rows=rows)
        for vocab_size in args.vocab_sizes
        for shape in args.shapes
        for case in args.cases
        for rows in args.rows
    ]
    table = [
        [
            *(r["case"], r["shape"], number(r["vocab_size"]), number(r["rows"])),
            *(number(r[key], 1) for key in ("torch_us", "torch_best_us", "native_us", "native_best_us")),
            number(r["ratio"], 3),
        ]
        for r in results
    ]
    conditions = {**setting(native), "repeats": args.repeats, "clock": args.clock}
    publish({"benchmark": "sampler", "environment": facts, "setting": conditions, "results": results}, HEAD, table, args.json)
    different = sum(r["different"] for r in results)
    print(f"\nids that differ: {different} of {sum(r['draws'] for r in results)}")
    return int(different > 0)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32])
    parser.add_argument("--vocab-sizes", type=numbers, default=[49_152])
    parser.add_argument("--shapes", nargs="+", choices=["peaked", "flat"], default=["peaked", "flat"])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=15, help="turns of each candidate")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    return parser


def _measure(
    native: Native, args: argparse.Namespace, *, case: str, shape: str, vocab_size: int, rows: int
) -> dict[str, float | int | str]:
    logits = _logits(shape, vocab_size, rows)
    times: tuple[list[float], list[float]] = ([], [])
    different = 0
    clock = CLOCKS[args.clock]
    for turn in range(args.repeats + 1):
        params = _params(rows, turn, CASES[case])
        torch_s, expected = _timed(clock, lambda params=params: sample(logits, params))
        native_s, got = _timed(clock, lambda params=params: sample(logits, params, choose=native.choose))
        different += int((expected != got).sum())
        if turn:  # the first one warms up
            times[0].append(torch_s / rows * 1e6)
            times[1].append(native_s / rows * 1e6)
    a, b = median(times[0]), median(times[1])
    cell = {"torch_us": a, "torch_best_us": min(times[0]), "native_us": b, "native_best_us": min(times[1]), "ratio": b / a}
    counts = {"vocab_size": vocab_size, "rows": rows, "different": different, "draws": rows * (args.repeats + 1)}
    return {"case": case, "shape": shape} | counts | cell


def _logits(shape: str, vocab_size: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator)
    if shape == "peaked":
        logits *= 2.5
        raised = torch.randint(vocab_size, (rows, 40), generator=generator)
        logits.scatter_add_(1, raised, torch.rand(rows, 40, generator=generator) * 6 + 6)
    return logits


def _params(rows: int, turn: int, case: dict[str, float]) -> SamplingInput:
    return SamplingInput(
        temperatures=np.full(rows, case.get("temperature", 1.0), np.float32),
        top_ps=np.full(rows, case.get("top_p", 1.0), np.float32),
        top_ks=np.full(rows, case.get("top_k", TOP_K_ALL), np.int32),
        min_ps=np.full(rows, case.get("min_p", 0.0), np.float32),
        seeds=np.arange(rows, dtype=np.int64),
        positions=np.full(rows, turn, np.int64),
    )


def _timed(clock: Callable[[], float], call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = clock()
    ids = call()
    return clock() - start, ids


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
