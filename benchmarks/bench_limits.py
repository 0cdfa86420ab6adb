"""Decode steps and prompts beside what the machine allows, for every form of the weights.

    python benchmarks/bench_limits.py
    python benchmarks/bench_limits.py --forms bfloat16,int8 --batches 1,8 --length 256 --prompts ""
    python benchmarks/bench_limits.py --forms bfloat16 --batches 8,64 --prompts 1024 --profile

The limit of a step is the larger of bytes / bandwidth (packed weights, and the KV of all requests) and operations / rate (float32),
both measured in the same run. ``outside`` is the share of the step that is spent outside the native library: Python, and torch
between calls. A prompt is computed in one step. --profile says where the time in the library goes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from bench_kernels import machine_limits
from bench_step import Case, EngineSide
from native_bench import begin, make_parser, numbers, setting
from report import environment, number, publish

from banyan.layers.embedding import Embedding
from banyan.layers.kernels.cpu.library import Native
from banyan.layers.linear import Linear
from banyan.model_executor.cpu_graph import CpuGraph
from banyan.model_executor.model_runner import ModelRunner
from banyan.model_executor.step import RunnerConfig
from banyan.srt.model_source import resolve_model

FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
CALLS = ("bny_run", "bny_linear", "bny_sample")
HEAD = ("weights", "step", "ms", "best", "limit", "best / limit", "outside", "tokens/s")
PROMPT_REPEATS = 3


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
    args, native = begin(_parser())
    facts = environment()
    bandwidth, flops = machine_limits(native)
    clock = Clock(native)
    results = [result for form in args.forms for result in _measure(form, args, clock, (bandwidth, flops))]
    conditions = {
        "model": args.model_path,
        "length": args.length,
        "steps": args.steps,
        **setting(native),
        "memory_read_gb_s": bandwidth / 1e9,
        "fma_gflops": flops / 1e9,
    }
    rows = [
        [
            r["form"],
            r["step"],
            *(number(r[key]) for key in ("ms", "best_ms", "limit_ms")),
            f"{r['best_ms'] / r['limit_ms']:.2f}",
            f"{r['outside']:.1%}",
            number(r["tokens"] / r["best_ms"] * 1e3, 0),
        ]
        for r in results
    ]
    publish({"benchmark": "limits", "environment": facts, "setting": conditions, "results": results}, HEAD, rows, args.json)
    for r in results if args.profile else ():
        shares = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(r["profile"].items(), key=lambda item: -item[1]) if ms > 0.005)
        print(f"{r['form']}, {r['step']}, ms: {shares}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--model-path", default="smollm2", help="alias, folder or .gguf file")
    parser.add_argument("--load-format", default="auto", help="as of banyan serve")
    parser.add_argument("--forms", type=lambda text: text.split(","), default=list(FORMS), help=f"of {', '.join(FORMS)}")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 64], help="requests of decode steps (default: 1,8,32,64)")
    parser.add_argument("--length", type=int, default=128, help="tokens of context of each request of a decode step")
    parser.add_argument("--prompts", type=numbers, default=[1024, 4096], help="tokens of prompts (default: 1024,4096)")
    parser.add_argument("--profile", action="store_true", help="time by kind of operation")
    parser.add_argument("--steps", type=int, default=24, help="measured steps of each case")
    return parser


def _measure(form: str, args: argparse.Namespace, clock: Clock, limits: tuple[float, float]) -> list[dict[str, Any]]:
    prompts = [Case("prefill", 1, length) for length in args.prompts]
    steps = [Case("decode", batch, args.length) for batch in args.batches]
    config = RunnerConfig(
        model_path=resolve_model(args.model_path).path,
        load_format=args.load_format,
        device="cpu",
        max_total_tokens=max(case.num_requests * (case.length + args.steps + 2) for case in (*steps, *prompts)),
        overlap=False,
        **FORMS[form],
    )
    side = EngineSide(config, [*steps, *prompts], args.steps + 1)
    bench = _Bench(side, clock, limits, args.profile)
    try:
        found = [bench.decode(case, args.steps) for case in steps] + [bench.prompt(case) for case in prompts]
        return [{"form": form, **result} for result in found]
    finally:
        side.runner.close()


class _Bench:
    """The cases of one form."""

    def __init__(self, side: EngineSide, clock: Clock, limits: tuple[float, float], profile: bool) -> None:
        self._side, self._clock, self._limits, self._profile = side, clock, limits, profile
        if not isinstance(side.runner, ModelRunner):
            raise TypeError("a real model is measured")
        self._runner = side.runner

    def decode(self, case: Case, steps: int) -> dict[str, Any]:
        """Steps that add a token to each request."""
        side, batch = self._side, case.num_requests
        side.place(batch, case.length, case.length + steps + 1)
        prompts = np.random.default_rng(0).integers(0, side.runner.info.vocab_size, (batch, case.length))
        ids = np.concatenate([side.extend(prompt[None], b) for b, prompt in enumerate(prompts)])
        ids = side.decode(ids, case.length)  # not counted
        lengths = iter(range(case.length + 1, case.length + 1 + steps))
        result = self._timed(lambda: side.decode(ids, next(lengths)), steps, tokens=batch)
        return {"step": f"decode {batch}", **result, **self._limit(batch, batch, case.length + steps // 2, batch)}

    def prompt(self, case: Case) -> dict[str, Any]:
        """One step over a prompt, again and again."""
        side, length = self._side, case.length
        side.place(1, length, length)
        prompt = np.random.default_rng(0).integers(0, side.runner.info.vocab_size, (1, length))
        result = self._timed(lambda: side.extend(prompt), PROMPT_REPEATS, tokens=length)
        return {"step": f"prompt {length}", **result, **self._limit(1, length, (length + 1) / 2, 1)}

    def _timed(self, step: Callable[[], object], repeats: int, *, tokens: int) -> dict[str, Any]:
        seconds, inside = [], []
        kinds: dict[str, float] = {}

        def run() -> None:
            for _ in range(repeats):
                self._clock.seconds, start = 0.0, time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
                inside.append(self._clock.seconds)

        graph = getattr(self._runner._require_cache().forward, "__self__", None)
        if self._profile and isinstance(graph, CpuGraph):
            kinds = graph.profile(run)
            kinds["head and sampling"] = sum(inside) - sum(kinds.values())
        else:
            run()
        return {
            "tokens": tokens,
            "ms": median(seconds) * 1e3,
            "best_ms": min(seconds) * 1e3,
            "outside": 1 - median(i / s for i, s in zip(inside, seconds, strict=True)),
            "profile": {kind: spent / repeats * 1e3 for kind, spent in kinds.items()},
        }

    def _limit(self, requests: int, tokens: int, context: float, sampled: int) -> dict[str, float]:
        """Of a step over so many tokens, each of which sees so much context on average."""
        model, cache = self._runner._loaded_model(), self._runner._require_cache()
        linears = [m.packed for m in model.modules() if isinstance(m, Linear | Embedding) and m.packed is not None]
        head = model.head.packed
        pool, layer = cache.backend._pool, model.layers[0].self_attn.attention.spec
        nbytes = sum(linear.nbytes for linear in linears)
        nbytes += int(sum(2 * pool.k(i)[0].nbytes for i in range(len(model.layers))) * requests * context)
        operations = 4.0 * tokens * context * layer.num_heads * layer.head_dim * len(model.layers)
        operations += sum(2.0 * (sampled if linear is head else tokens) * linear.n * linear.k for linear in linears)
        limit = max(nbytes / self._limits[0], operations / self._limits[1])
        return {"limit_ms": limit * 1e3, "bytes": nbytes, "operations": operations}


if __name__ == "__main__":
    sys.exit(main())
