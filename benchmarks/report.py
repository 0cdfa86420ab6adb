"""What every benchmark prints beside its numbers: where, on what and by which command they were made. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
# Instructions that decide how fast a CPU multiplies matrices.
CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "fastapi", "uvicorn", "pyzmq", "msgspec", "httpx")


def environment() -> dict[str, Any]:
    """Machine, commit, versions and command line of this run, as JSON. Call it before the measurement: it tells the load then."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, the flags that matter, memory and the load average of the last minute."""
    model, flags = _cpuinfo()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": model,
        "cores": psutil.cpu_count(logical=False),
        "usable_cpus": usable,
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": _gpus(),
        "os": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _cpuinfo() -> tuple[str, set[str]]:
    """(name, flags) as /proc/cpuinfo has them; where there is none, what platform knows."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    family = "".join(f" {key} {fields[key]}" for key in ("cpu family", "model", "stepping") if key in fields)
    return f"{name} ({family.strip()})" if family else name, set(fields.get("flags", "").split())


def _gpus() -> list[str]:
    lines = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return lines.splitlines() if lines else []


def commit() -> str:
    """Short name of the commit, "(dirty)" if a tracked file differs from it, "unknown" outside of a git checkout."""
    name = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if name is None:
        return "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{name} (dirty)" if changed else name


def _output(*command: str) -> str | None:
    """What a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Of Python, the project and the packages that matter to speed."""
    found = {"python": platform.python_version(), "banyan": importlib.metadata.version("banyan-engine")}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment_lines(facts: dict[str, Any]) -> list[str]:
    """The environment for people: one line for each question."""
    host = facts["machine"]
    gpus = "".join(f"; GPU {gpu}" for gpu in host["gpus"])
    threads = f", OMP_NUM_THREADS={host['threads']}" if host["threads"] else ""
    return [
        f"command: {facts['command']}",
        f"commit: {facts['commit']}, {facts['date']}",
        f"machine: {host['cpu']}, {host['cores']} cores ({host['usable_cpus']} usable CPUs{threads}), "
        f"{' '.join(host['flags']) or 'no vector flags known'}, {host['memory_gib']} GiB{gpus}; {host['os']}; "
        f"load average {host['load_average']} at start",
        "versions: " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    ]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, 90th and 99th percentile (linear interpolation), or None of nothing."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}


def number(value: float | int | str | None, digits: int = 2) -> str:
    """A cell of a table: "-" for what was not measured."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned, so that it reads as well in a terminal; the first column is text, the others are numbers."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def publish(result: dict[str, Any], head: Sequence[str], rows: Sequence[Sequence[str]], json_path: str | None) -> None:
    """Print the environment (``result["environment"]``), ``result["setting"]`` and the table; write all of the result as JSON."""
    for line in environment_lines(result["environment"]):
        print(line)
    print("setting: " + ", ".join(f"{name} {number(value)}" for name, value in result["setting"].items()))
    print()
    print(table(head, rows), flush=True)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")
