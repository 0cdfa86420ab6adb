"""A pytest plugin, ``-p emulated_avx512``: the CPU has AVX-512, whose instructions SIMDe's functions compute."""

from __future__ import annotations

import hashlib
from pathlib import Path

from banyan.layers.kernels.cpu import build

HEADER = Path(__file__).with_name("avx512_emulated.h")
SIMDE = Path("/usr/include/simde/x86/avx512.h")
VERSION = f"-DEMULATION=0x{hashlib.sha256(HEADER.read_bytes()).hexdigest()[:12]}"  # the header is not among the sources
# -O1: optimising emulated vectors takes minutes, and these tests need none.
FLAGS = ("-O1", "-mavx2", "-mfma", "-mf16c", "-include", str(HEADER), VERSION)
NEEDED = ("avx2", "fma", "f16c")
EMULATED = {"avx512": (NEEDED, (*FLAGS, "-DBNY_EMULATED=1")), "avx512_bf16": (NEEDED, (*FLAGS, "-DBNY_EMULATED=2"))}


def pytest_configure() -> None:
    """As a plugin, before tests are collected."""
    build.LEVELS.clear()
    build.LEVELS.update(EMULATED)
