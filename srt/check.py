"""``banyan check``: whether this machine can serve with these options, before anything is started."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from ..managers.errors import StartError
from .model_source import cache_dir, resolve_model
from .server_args import ServerArgs

MIN_FILES = 4096  # descriptors: each client takes one
COMPILERS = ("c++", "g++", "clang++")
MIN_CACHE_BYTES = 2 << 30
WARM_BYTES = 1 << 30  # besides weights: code, activations, the other processes


class Finding(NamedTuple):
    """level: "ok", "warning" (it will run, maybe badly) or "error" (it will not start)."""

    level: str
    topic: str
    text: str


def check(args: ServerArgs) -> list[Finding]:
    """Every question, in the order in which a start would meet it. A model that is not here is fetched, nothing else is done."""
    checks: tuple[Callable[[ServerArgs], list[Finding]], ...] = (
        _port,
        _model,
        _memory,
        _threads,
        _files,
        _sockets,
        _cache,
        _outside,
    )
    return [finding for one in checks for finding in one(args)]


def report(findings: list[Finding]) -> str:
    """One line each."""
    return "\n".join(f"{finding.level:8} {finding.topic:10} {finding.text}" for finding in findings)


def _port(args: ServerArgs) -> list[Finding]:
    from .listen import bind

    try:
        bind(args.host, args.port).close()
    except StartError as error:
        return [Finding("error", "port", str(error))]
    return [Finding("ok", "port", f"{args.host}:{args.port} is free")]


def _model(args: ServerArgs) -> list[Finding]:
    try:
        path = Path(resolve_model(args.model_path, args.revision, args.download_dir).path)
    except StartError as error:
        return [Finding("error", "model", str(error))]
    size = weight_bytes(path)
    if not size and args.load_format not in ("dummy", "oracle"):
        return [Finding("error", "model", f"{path} holds no weights (*.safetensors or .gguf)")]
    return [Finding("ok", "model", f"{path}, {size / 1e9:.2f} GB of weights")]


def weight_bytes(path: Path) -> int:
    """Size of the files with weights."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _memory(args: ServerArgs) -> list[Finding]:
    free = psutil.virtual_memory().available
    limit = _cgroup_limit()
    if limit is not None:
        free = min(free, limit)
    try:
        need = 2 * weight_bytes(Path(resolve_model(args.model_path, args.revision, args.download_dir).path)) + WARM_BYTES
    except StartError:
        return []
    text = f"{free / 1e9:.1f} GB free, about {need / 1e9:.1f} GB wanted before any KV cache (on a CPU)"
    return [Finding("ok" if free > need else "warning", "memory", text)]


def _cgroup_limit() -> int | None:
    """What a container leaves, None without a limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
    except OSError:
        return None
    return None if limit == "max" else max(int(limit) - used, 0)


def _threads(args: ServerArgs) -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > cores:
        return [Finding("warning", "threads", f"OMP_NUM_THREADS={given} with {cores} cores: the threads will wait for each other")]
    level = "ok" if cores > 1 else "warning"
    return [Finding(level, "threads", f"{cores} cores" + ("" if cores > 1 else ": the processes will share it"))]


def _files(args: ServerArgs) -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = "ok" if soft >= MIN_FILES else "warning"
    return [Finding(level, "files", f"{soft} descriptors may be open (at most {hard}); each client takes one")]


def _sockets(args: ServerArgs) -> list[Finding]:
    folder = tempfile.gettempdir()
    if not os.access(folder, os.W_OK):
        return [Finding("error", "sockets", f"{folder} is not writable (TMPDIR)")]
    free = shutil.disk_usage(folder).free
    level = "ok" if free > 64 << 20 else "warning"
    return [Finding(level, "sockets", f"{folder}, {free / 1e9:.1f} GB free")]


def _cache(args: ServerArgs) -> list[Finding]:
    """Kernels and packed weights are kept there; without it every start makes them again, or does without."""
    folder = cache_dir()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Finding("warning", "cache", f"{existing} cannot be written: kernels and packed weights are not kept")]
    free = shutil.disk_usage(existing).free
    level = "ok" if free > MIN_CACHE_BYTES else "warning"
    return [Finding(level, "cache", f"{folder}, {free / 1e9:.1f} GB free")]


def _outside(args: ServerArgs) -> list[Finding]:
    found = []
    given = os.environ.get("CXX", "")
    compiler = next(filter(None, map(shutil.which, (given,) if given else COMPILERS)), None)
    if compiler is None:
        lacking = f"CXX names {given}, which is not there" if given else f"none of {', '.join(COMPILERS)} is there"
        found.append(Finding("warning", "compiler", f"{lacking}: without a C++ compiler torch computes, which is slower"))
    else:
        found.append(Finding("ok", "compiler", compiler))
    if args.host not in ("127.0.0.1", "localhost", "::1"):
        found.append(
            Finding("warning", "network", f"{args.host} can be reached from other machines; put a proxy or keys before it")
        )
    return found
