"""The linears of a model alone: every packed kind beside torch, and beside what memory and the arithmetic units allow.

    python benchmarks/bench_kernels.py
    python benchmarks/bench_kernels.py --rows 1,64 --kinds BF16,I8 --layers 4

Times are those of a stack of layers of SmolLM2-135M's shapes, each with weights of its own, so that they come from memory as they
do in a model. The candidates take turns; ``ms`` is the median and ``best`` the smallest of the repeats. The limit is the larger of
bytes / bandwidth and operations / rate, both measured in the same run, the rate in float32; its share is that of the best. Integer
products may go beyond the rate of float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from native_bench import begin, make_parser, numbers, setting
from report import environment, number, publish

from banyan.layers.kernels.cpu.library import Native
from banyan.layers.kernels.cpu.packed import Kind, PackedLinear, PackedWeight, aligned

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # (outputs, inputs): QKV, o, gate-up, down
MIB = 1 << 20
READ = 256 * MIB
FMA_ROUNDS = 1_000_000
PATIENCE = 1.5  # seconds: what takes longer is measured once


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to multiply by the whole stack."""

    name: str
    products: list[Callable[[torch.Tensor], torch.Tensor]]
    nbytes: int
    dtype: torch.dtype


def main() -> int:
    args, native = begin(_parser())
    facts = environment()
    bandwidth, flops = machine_limits(native)
    shapes = [shape for _ in range(args.layers) for shape in LAYER]
    candidates = _candidates(native, shapes, args.kinds)
    results = []
    for m in args.rows:
        times = _turns(candidates, shapes, m, args.repeats)
        operations = 2.0 * m * sum(n * k for n, k in shapes)
        for candidate, seconds in zip(candidates, times, strict=True):
            limit = max(candidate.nbytes / bandwidth, operations / flops)
            cell = {"ms": median(seconds) * 1e3, "best_ms": min(seconds) * 1e3, "limit_ms": limit * 1e3}
            results.append({"rows": m, "kind": candidate.name, **cell, "speedup": median(times[0]) / median(seconds)})
    conditions = {
        "layers": args.layers,
        **setting(native),
        "memory_read_gb_s": bandwidth / 1e9,
        "fma_gflops": flops / 1e9,
    }
    head = ("weights", "rows", "ms", "best", "limit", "share of the limit", "speed, torch float32 = 1")
    rows = [
        [
            r["kind"],
            str(r["rows"]),
            *(number(r[key]) for key in ("ms", "best_ms", "limit_ms")),
            f"{r['limit_ms'] / r['best_ms']:.0%}",
            number(r["speedup"]),
        ]
        for r in results
    ]
    publish({"benchmark": "kernels", "environment": facts, "setting": conditions, "results": results}, head, rows, args.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64, 256, 512])
    parser.add_argument("--kinds", type=lambda text: [Kind[part] for part in text.split(",")], default=list(Kind)[:5])
    parser.add_argument("--layers", type=int, default=12, help="layers of the stack")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    return parser


def machine_limits(native: Native) -> tuple[float, float]:
    """(bytes a second, float32 operations a second)."""
    block, sink = aligned(READ).zero_(), torch.zeros(1)
    address = block.data_ptr()
    read = min(_timed(lambda: native.lib.bny_read_memory(address, READ)) for _ in range(5))
    operations = float(native.lib.bny_peak_flops(FMA_ROUNDS, sink.data_ptr()))
    compute = min(_timed(lambda: native.lib.bny_peak_flops(FMA_ROUNDS, sink.data_ptr())) for _ in range(3))
    return READ / read, operations / compute


def _candidates(native: Native, shapes: list[tuple[int, int]], kinds: list[Kind]) -> list[Candidate]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        plain = [torch.randn(n, k).mul_(0.05).to(dtype) for n, k in shapes]
        size = sum(w.numel() for w in plain) * dtype.itemsize
        name = str(dtype).removeprefix("torch.")
        found.append(Candidate(f"torch {name}", [lambda x, w=w: F.linear(x, w) for w in plain], size, dtype))
        try:
            ordered = [torch.ops.mkldnn._reorder_linear_weight(w, None) for w in plain]
        except RuntimeError:  # oneDNN has no bfloat16 for this CPU
            continue
        call = [lambda x, w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in ordered]
        found.append(Candidate(f"torch {name}, packed by oneDNN", call, size, dtype))
    for kind in kinds:
        packed = [PackedLinear([PackedWeight.pack(native, kind, torch.randn(n, k).mul_(0.05))], None) for n, k in shapes]
        found.append(Candidate(kind.name, list(packed), sum(p.nbytes for p in packed), torch.float32))
    return found


def _turns(candidates: list[Candidate], shapes: list[tuple[int, int]], m: int, repeats: int) -> list[list[float]]:
    """Seconds of every turn of each candidate."""
    seconds: list[list[float]] = [[] for _ in candidates]
    inputs = {(k, dtype): torch.randn(m, k).to(dtype) for _, k in set(shapes) for dtype in (torch.float32, torch.bfloat16)}
    with torch.inference_mode():
        for _ in range(repeats):
            for candidate, own in zip(candidates, seconds, strict=True):
                if own and own[0] > PATIENCE:
                    continue
                pairs = [(run, inputs[k, candidate.dtype]) for run, (_, k) in zip(candidate.products, shapes, strict=True)]
                own.append(_timed(lambda pairs=pairs: [run(x) for run, x in pairs] and None))
    return seconds


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
