"""Prove and measure on a GPU what was built without one; a table, and a report in JSON. It ends within 8 minutes.

    make gpu-check
    python benchmarks/gpu_check.py --packages build/gpu-packages > report.json
    python benchmarks/gpu_check.py --dry-run              # the parts that a CPU can do, on tiny models

Each section runs in a process of its own with a time limit, so that one that fails or hangs does not stop the rest. Sections:
environment, limits (memory and matrix speed of this device), kernels (against float32 in torch), matrix (greedy ids over backends,
graphs, page sizes, chunks, pipelining), syncs (a decode step never waits for the device), memory (the largest step fits beside the
pool), speed (decode and prefill beside the limits, quantised weights too), overlap (host time that is hidden). Needs torch, triton,
numpy, msgspec, psutil and safetensors; --packages names a folder that holds what the machine lacks (pip install --target).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {  # seconds that each may take
    "environment": 60,
    "limits": 60,
    "kernels": 120,
    "matrix": 120,
    "syncs": 60,
    "memory": 60,
    "speed": 150,
    "overlap": 60,
}
TOTAL = 470  # seconds of all sections together
MARK = "GPU-CHECK "  # before a section's result on its standard output


def run_sections(names: Sequence[str], extra: Sequence[str]) -> dict[str, Any]:
    """Section -> what it found, or what went wrong."""
    report: dict[str, Any] = {}
    end = time.perf_counter() + TOTAL
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "banyan").symlink_to(ROOT)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}
        for name in names:
            start = time.perf_counter()
            print(f"{name} ...", file=sys.stderr, flush=True)
            limit = min(SECTIONS[name], end - start)
            found = {"ok": False, "error": "no time left"} if limit < 1 else _run_section(name, extra, env, limit)
            report[name] = found | {"seconds": round(time.perf_counter() - start, 1)}
            print(f"{name}: {'ok' if report[name]['ok'] else 'FAILED'}", file=sys.stderr, flush=True)
    return report


def _run_section(name: str, extra: Sequence[str], env: dict[str, str], limit: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--section", name, *extra]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        tail = error.stderr[-2000:].decode(errors="replace") if isinstance(error.stderr, bytes) else ""
        return {"ok": False, "error": f"no end after {limit:.0f} seconds", "tail": tail}
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        return {"ok": False, "error": f"exit status {done.returncode}", "tail": done.stderr[-3000:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return {"ok": result.pop("ok", True)} | result


def table(report: dict[str, Any]) -> str:
    """The report for people: a line for each section, and for each number of those that measure."""
    lines = [f"{'section':<14}{'result':<9}{'seconds':>8}"]
    for name, section in report.items():
        lines.append(
            f"{name:<14}{'ok' if section['ok'] else 'FAILED':<9}{section['seconds']:>8}  {section.get('error', '')}".rstrip()
        )
    for name, section in report.items():
        for label, value in _leaves(section, name):
            if isinstance(value, int | float) and not isinstance(value, bool):
                lines.append(f"{label:<70}{value:>14,}")
    return "\n".join(lines)


def _leaves(value: Any, label: str) -> list[tuple[str, Any]]:
    """(path, value) of what a result holds; of checks only those that failed."""
    if not isinstance(value, dict):
        return [(label, value)]
    if value.get("ok") is True and "worst" in value:
        return []
    return [leaf for name, inner in value.items() if name != "seconds" for leaf in _leaves(inner, f"{label}: {name}")]


# --- sections: each imports what it needs ----------------------------------------------------------------------------------------


def environment(dry: bool) -> dict[str, Any]:
    """Versions, the device, and which attention backend would be chosen."""
    import torch

    from banyan.layers.attention.choice import AttentionNeeds, choose_attention, describe, installed_libraries

    cuda = not dry
    capability = torch.cuda.get_device_capability() if cuda else None
    needs = AttentionNeeds(
        device="cuda" if cuda else "cpu",
        capability=capability,
        installed=installed_libraries(),
        head_dim=64,
        kv_bytes=2,
        model_bytes=2,
    )
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "capability": capability,
        "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1) if cuda else None,
        "libraries": sorted(installed_libraries()),
        "attention": describe(choose_attention(needs, cpu="torch_native")),
    }


def limits(dry: bool) -> dict[str, Any]:
    """GB/s of a copy (read plus write) and TFLOP/s of a bf16 product."""
    import torch

    device, size, dim = ("cpu", 1 << 22, 256) if dry else ("cuda", 1 << 30, 8192)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), dry)
    a = torch.randn(dim, dim, device=device, dtype=torch.float32 if dry else torch.bfloat16)
    product = _seconds(lambda: a @ a, dry)
    return {"memory_gb_s": round(2 * size / copy / 1e9, 1), "tflop_s": round(2 * dim**3 / product / 1e12, 5)}


def _seconds(call: Callable[[], Any], dry: bool, repeats: int = 20) -> float:
    """Median seconds of a call, on the device."""
    import statistics

    import torch

    found = []
    for _ in range(3 if dry else repeats):
        if not dry:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if not dry:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def kernels(dry: bool) -> dict[str, Any]:
    """Greatest difference of each kernel to torch in float32, and whether it is within what its dtype allows."""
    if dry:
        return {"skipped": "no GPU: the interpreter tests them (tests/layers/test_triton.py)"}
    import gpu_kernel_checks

    results = gpu_kernel_checks.check_all()
    return {"ok": all(result["ok"] for result in results.values()), "checks": results}


def matrix(dry: bool) -> dict[str, Any]:
    """Greedy ids of one model in float32 over backends, graphs, page sizes, chunks and pipelining: all the same."""
    import itertools

    from gpu_driver import Driver, random_model

    backends = ["torch_native"] if dry else ["torch_native", "triton"]
    graphs = [False] if dry else [False, True]
    ids: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(folder, "tiny" if dry else "smollm2")
        for backend, page, graph in itertools.product(backends, (1, 16), graphs):
            if graph and backend == "torch_native":
                continue
            options: dict[str, Any] = {"attention_backend": backend, "page_size": page, "disable_cuda_graph": not graph}
            if graph:
                options |= {"cuda_graph_max_bs": 8, "prefill_cuda_graph_max_tokens": 256}
            with Driver(model, dry=dry, dtype="float32", **options) as driver:
                for chunk, pipelined in itertools.product((None, 48), (False, True)):
                    name = f"{backend} page {page} graphs {graph} chunk {chunk} pipelined {pipelined}"
                    ids[name] = driver.generate([70, 33, 128, 5, 97], 8 if dry else 24, chunk=chunk, pipelined=pipelined)
    first = next(iter(ids.values()))
    differing = [name for name, found in ids.items() if found != first]
    return {
        "ok": not differing,
        "runs": len(ids),
        "differing": differing,
        "distinct_tokens": len({i for row in first for i in row}),
    }


def syncs(dry: bool) -> dict[str, Any]:
    """Decode steps under torch's sync debug mode "error": whatever makes the host wait raises."""
    if dry:
        return {"skipped": "no GPU"}
    import torch
    from gpu_driver import Driver, random_model

    with tempfile.TemporaryDirectory() as folder, Driver(random_model(folder, "smollm2"), dry=False, dtype="bfloat16") as driver:
        driver.generate([70, 33, 128], 8, pipelined=True, temperature=0.8)
        driver.before_decode = lambda: torch.cuda.set_sync_debug_mode("error")
        driver.after_decode = lambda: torch.cuda.set_sync_debug_mode("default")
        driver.generate([70, 33, 128], 16, pipelined=True, temperature=0.8)
    return {"decode_steps_without_a_sync": 16}


def memory(dry: bool) -> dict[str, Any]:
    """A pool of the size that the runner finds, all of it allocated, holds beside steps of the largest size."""
    from gpu_driver import Driver, random_model

    with tempfile.TemporaryDirectory() as folder:
        model = random_model(folder, "tiny" if dry else "1b")
        dtype, chunk = ("float32", 64) if dry else ("bfloat16", 8192)
        with Driver(model, dry=dry, dtype=dtype, tokens=4096 if dry else None, chunked_prefill_size=chunk) as driver:
            tokens = driver.runner.max_cache_tokens()
            driver.prefill([chunk, chunk])
            return {"ok": tokens > 2 * chunk, "tokens": tokens, "why": driver.runner.info.explain["pool"]}


def speed(dry: bool) -> dict[str, Any]:
    """Milliseconds of a decode step and tokens a second of prefill, beside what memory and matrix speed allow."""
    from gpu_driver import Driver, random_model, weight_bytes

    bounds = limits(dry)
    shape = "tiny" if dry else "1b"
    decode: dict[str, Any] = {}
    short: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(folder, shape)
        num_bytes, kv_bytes = weight_bytes(shape)
        for graph in (True, False):
            with Driver(model, dry=dry, dtype="float32" if dry else "bfloat16", disable_cuda_graph=not graph) as driver:
                for size, context in ((1, 24), (4, 24)) if dry else ((1, 1024), (32, 1024), (256, 1024)):
                    seconds = driver.decode_seconds(size, context, 3 if dry else 20)
                    least = (num_bytes + size * context * kv_bytes) / bounds["memory_gb_s"] / 1e9
                    decode[f"{size} x {context} graphs {graph}"] = {"ms": _ms(seconds), "memory_limit_ms": _ms(least)}
                short[f"graphs {graph}"] = _ms(driver.prefill_seconds(20 if dry else 256, 2 if dry else 10))
                if graph:
                    tokens = 32 if dry else 8192
                    prefill = driver.prefill_seconds(tokens, 2 if dry else 5)
        quantised = {} if dry else {form: _ms(_quantised_seconds(model, form)) for form in ("int8", "fp8", "int4")}
        least = 2 * (num_bytes / (4 if dry else 2)) * tokens / bounds["tflop_s"] / 1e12
    rate = {"tokens": tokens, "tok_s": round(tokens / prefill), "compute_limit_tok_s": round(tokens / least)}
    return {"limits": bounds, "decode": decode, "quantised 32 x 1024 ms": quantised, "short prompt ms": short, "prefill": rate}


def _quantised_seconds(model: str, form: str) -> float:
    """Of a decode step of 32 requests with 1,024 tokens each."""
    from gpu_driver import Driver

    options = {"quantization": form, "cuda_graph_bs": "32", "disable_prefill_cuda_graph": True}
    with Driver(model, dry=False, dtype="bfloat16", **options) as driver:
        return driver.decode_seconds(32, 1024, 20)


def overlap(dry: bool) -> dict[str, Any]:
    """A decode step when the host waits for each one, when it launches one ahead, and what the launch itself takes."""
    from gpu_driver import Driver, random_model

    size, context, steps = (2, 20, 4) if dry else (64, 512, 100)
    with tempfile.TemporaryDirectory() as folder:
        dtype = "float32" if dry else "bfloat16"
        with Driver(random_model(folder, "tiny" if dry else "1b"), dry=dry, dtype=dtype) as driver:
            waiting = driver.decode_seconds(size, context, steps, pipelined=False)
            ahead = driver.decode_seconds(size, context, steps, pipelined=True)
            launch = driver.launch_seconds
    hidden = max(0.0, waiting - ahead)
    return {"waiting_ms": _ms(waiting), "one_ahead_ms": _ms(ahead), "launch_ms": _ms(launch), "hidden_ms": _ms(hidden)}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections and print the report; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between (default: all)")
    parser.add_argument("--packages", help="folder with packages that this machine lacks")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.packages:
        sys.path.append(os.path.abspath(options.packages))
    if options.section:
        print(MARK + json.dumps(globals()[options.section](options.dry_run)))
        return 0
    names = [name for name in options.only.split(",") if name]
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}; sections are {', '.join(SECTIONS)}")
    extra = ["--dry-run"] if options.dry_run else []
    extra += ["--packages", options.packages] if options.packages else []
    report = run_sections(names, extra)
    print(table(report), file=sys.stderr, flush=True)
    print(json.dumps(report, indent=2))
    return int(not all(section["ok"] for section in report.values()))


if __name__ == "__main__":
    sys.exit(main())
