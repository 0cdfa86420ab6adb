"""Decode steps beside what the machine allows, for every form of the weights.

    python benchmarks/bench_limits.py
    python benchmarks/bench_limits.py --forms bfloat16,int8 --batches 1,8 --length 256

The limit of a step is the larger of bytes / bandwidth (packed weights, and the KV of all requests) and operations / rate (float32),
both measured in the same run. ``outside`` is the share of the step that is spent outside the native library: Python, and torch
between calls.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_kernels import machine_limits
from bench_step import Case, EngineSide
from report import environment, number, publish

from banyan.layers.embedding import Embedding
from banyan.layers.kernels.cpu.library import Native, native_kernels
from banyan.layers.linear import Linear
from banyan.model_executor.model_runner import ModelRunner
from banyan.model_executor.step import RunnerConfig
from banyan.srt.model_source import resolve_model

FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
CALLS = ("bny_run", "bny_linear", "bny_greedy")
HEAD = ("weights", "batch", "ms", "best", "limit", "best / limit", "outside")


class Clock:
    """Seconds spent in the library's functions, while it is in place of them."""

    def __init__(self, native: Native) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(native.lib, name, self._timed(getattr(native.lib, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def main() -> int:
    """Run; the exit status."""
    args = _arguments()
    native = native_kernels()
    if not isinstance(native, Native):
        print(f"bench_limits: error: {native.why}", file=sys.stderr)
        return 1
    facts = environment()
    bandwidth, flops = machine_limits(native)
    clock = Clock(native)
    results = [result for form in args.forms for result in _measure(form, args, clock, (bandwidth, flops))]
    setting = {
        "model": args.model_path,
        "length": args.length,
        "steps": args.steps,
        "threads": torch.get_num_threads(),
        "kernels": native.isa,
        "memory_read_gb_s": bandwidth / 1e9,
        "fma_gflops": flops / 1e9,
    }
    rows = [
        [
            r["form"],
            str(r["batch"]),
            *(number(r[key]) for key in ("ms", "best_ms", "limit_ms")),
            f"{r['best_ms'] / r['limit_ms']:.2f}",
            f"{r['outside']:.1%}",
        ]
        for r in results
    ]
    publish({"benchmark": "limits", "environment": facts, "setting": setting, "results": results}, HEAD, rows, args.json)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2", help="alias, folder or .gguf file")
    parser.add_argument("--load-format", default="auto", help="as of banyan serve")
    parser.add_argument("--forms", type=lambda text: text.split(","), default=list(FORMS), help=f"of {', '.join(FORMS)}")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--length", type=int, default=128, help="tokens of context of each request")
    parser.add_argument("--steps", type=int, default=24, help="measured steps of each case")
    parser.add_argument("--threads", type=int, help="threads, if not torch's default")
    parser.add_argument("--json", help="file for everything that was measured")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def _measure(form: str, args: argparse.Namespace, clock: Clock, limits: tuple[float, float]) -> list[dict[str, Any]]:
    cases = [Case("decode", batch, args.length) for batch in args.batches]
    config = RunnerConfig(
        model_path=resolve_model(args.model_path).path,
        load_format=args.load_format,
        device="cpu",
        max_total_tokens=max(args.batches) * (args.length + args.steps + 2),
        overlap=False,
        **FORMS[form],
    )
    side = EngineSide(config, cases, args.steps + 1)
    try:
        return [{"form": form, **_case(case, side, args.steps, clock, limits)} for case in cases]
    finally:
        side.runner.close()


def _case(case: Case, side: EngineSide, steps: int, clock: Clock, limits: tuple[float, float]) -> dict[str, Any]:
    batch = case.num_requests
    side.place(batch, case.length, case.length + steps + 1)
    prompts = np.random.default_rng(0).integers(0, side.runner.info.vocab_size, (batch, case.length))
    ids = np.concatenate([side.extend(prompt[None], b) for b, prompt in enumerate(prompts)])
    ids = side.decode(ids, case.length)  # not counted
    seconds, inside = [], []
    for i in range(steps):
        clock.seconds, start = 0.0, time.perf_counter()
        ids = side.decode(ids, case.length + 1 + i)
        seconds.append(time.perf_counter() - start)
        inside.append(clock.seconds)
    nbytes, operations = _work(side.runner, batch, case.length + steps // 2)
    limit = max(nbytes / limits[0], operations / limits[1])
    outside = 1 - median(i / s for i, s in zip(inside, seconds, strict=True))
    return {
        "batch": batch,
        "ms": median(seconds) * 1e3,
        "best_ms": min(seconds) * 1e3,
        "limit_ms": limit * 1e3,
        "bytes": nbytes,
        "outside": outside,
    }


def _work(runner: Any, batch: int, context: int) -> tuple[float, float]:
    """Bytes that a step must read, and operations."""
    if not isinstance(runner, ModelRunner):
        raise TypeError("a real model is measured")
    model, cache = runner._loaded_model(), runner._require_cache()
    packed = [m.packed for m in model.modules() if isinstance(m, Linear | Embedding) and m.packed is not None]
    weights = sum(linear.nbytes for linear in packed)
    pool = cache.backend._pool
    kv = sum(2 * pool.k(i)[0].nbytes for i in range(len(model.layers))) * batch * context
    layer = model.layers[0].self_attn.attention.spec
    attention = 4.0 * batch * context * layer.num_heads * layer.head_dim * len(model.layers)
    return float(weights + kv), 2.0 * batch * sum(linear.n * linear.k for linear in packed) + attention


if __name__ == "__main__":
    sys.exit(main())
