"""Builds the native CPU kernels on first use and keeps the library in the user's cache folder.

A library is compiled for one instruction-set level, the best one that the CPU has or the one that BANYAN_CPU_ISA names. Its folder
is named by a hash of all that it depends on, so a changed source or compiler builds anew, and a cache that moved to another CPU is
never loaded. ``python -m banyan.layers.kernels.cpu.build`` builds and says what it did (``banyan build-kernels``).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-Wall")
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 600.0  # seconds for one run of the compiler

# Level -> what the CPU must have, and the compiler's flags; ascending.
LEVELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "generic": ((), ()),
    "avx2": (("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c")),
    "avx512": (
        ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
        ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    ),
    "avx512_bf16": (
        ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"),
        ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16"),
    ),
}


class BuildError(RuntimeError):
    """No library could be built. The message is one line; ``detail`` is what the compiler said."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Built:
    """A library on disk."""

    path: Path
    isa: str
    compiler: str  # its first line of --version
    seconds: float | None  # that building took, None: it was there


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Names of the CPU's features as Linux lists them; empty where it does not."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def supported_levels() -> list[str]:
    """Levels that this CPU can run, the best last."""
    return [name for name, (needed, _) in LEVELS.items() if cpu_flags().issuperset(needed)]


def choose_level() -> tuple[str, str]:
    """(level, why): BANYAN_CPU_ISA, else the best. Raises ValueError for a level that is unknown or that the CPU lacks."""
    wanted = os.environ.get("BANYAN_CPU_ISA", "")
    if not wanted:
        return supported_levels()[-1], "the best that the CPU has"
    if wanted not in LEVELS:
        raise ValueError(f"BANYAN_CPU_ISA {wanted!r} is unknown; known are {', '.join(LEVELS)}")
    if lacking := sorted(set(LEVELS[wanted][0]) - cpu_flags()):
        raise ValueError(f"BANYAN_CPU_ISA {wanted}: this CPU lacks {', '.join(lacking)}")
    return wanted, "BANYAN_CPU_ISA"


def build(level: str) -> Built:
    """The library of a level from the cache, built if it is not there. Raises BuildError."""
    compiler = _compiler()
    version = _version(compiler)
    folder = cache_folder() / f"{level}-{_key(level, version)}"
    library = folder / "kernels.so"
    if library.exists():
        return Built(library, level, version, None)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if library.exists():  # another process was quicker
                return Built(library, level, version, None)
            start = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{level}-") as scratch:
                _compile(compiler, level, Path(scratch))
                folder.mkdir(mode=0o700, exist_ok=True)
                os.replace(Path(scratch) / library.name, library)
            return Built(library, level, version, time.perf_counter() - start)
    except OSError as error:
        raise BuildError(f"the cache folder {folder.parent} cannot be written: {error}") from None


def cache_folder() -> Path:
    """Where libraries are kept: kernels in $BANYAN_CACHE, else in banyan in $XDG_CACHE_HOME or ~/.cache."""
    if given := os.environ.get("BANYAN_CACHE"):
        return Path(given).expanduser() / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "banyan" / "kernels"


def _compiler() -> str:
    given = os.environ.get("CXX", "")
    for name in (given,) if given else COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler: {'CXX names ' + given if given else ', '.join(COMPILERS) + ' are not in PATH'}")


def _version(compiler: str) -> str:
    return (_run([compiler, "--version"]).splitlines() or [compiler])[0]


def _key(level: str, version: str) -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    for part in (*FLAGS, *LEVELS[level][1], version, platform.machine(), *sorted(cpu_flags())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compile(compiler: str, level: str, folder: Path) -> None:
    """Objects side by side, then kernels.so."""
    flags = [*FLAGS, *LEVELS[level][1]]
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    commands = [[compiler, *flags, "-c", str(source), "-o", target] for source, target in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)) as pool:
        list(pool.map(_run, commands))
    _run([compiler, *flags, "-shared", *objects, "-o", str(folder / "kernels.so")])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        raise BuildError(f"{command[0]} failed with status {done.returncode}", done.stderr)
    return done.stdout


def main() -> int:
    """Build for this CPU and say what, where, and in how long; 1 if it cannot be done."""
    try:
        level, why = choose_level()
        built = build(level)
    except (BuildError, ValueError) as error:
        if isinstance(error, BuildError) and error.detail:
            print(error.detail.rstrip(), file=sys.stderr)
        print(f"banyan: error: {error}", file=sys.stderr)
        return 1
    how = "was built before" if built.seconds is None else f"built in {built.seconds:.1f} s"
    print(f"{built.path}\nlevel {level} ({why}), {built.compiler}, {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
