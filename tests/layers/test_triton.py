"""Triton kernels without a GPU: numerics under the interpreter, code generation for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import banyan

pytest.importorskip("triton")
ROOT = Path(banyan.__file__).parent


def run(*arguments: str, timeout: float, **environment: str) -> str:
    env = os.environ | {"TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def cases(mark: str, timeout: float) -> str:
    files = ("tests/layers/triton_cases.py", "tests/layers/triton_op_cases.py")
    return run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-m", mark, timeout=timeout, TRITON_INTERPRET="1")


def test_kernels_equal_torch_under_the_interpreter():
    assert " passed" in cases("not nightly", timeout=150)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_kernels_equal_torch_over_the_whole_grid():
    assert " passed" in cases("nightly", timeout=1700)


@pytest.mark.parametrize("kernel", ["attend decode fp16", "store_kv bf16"])
def test_a_kernel_compiles_without_a_gpu(kernel):
    out = run("benchmarks/compile_kernels.py", "--capability", "90", "--kernel", kernel, timeout=150)
    assert "registers" in out and "shared" in out


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_every_generation_and_fits():
    out = run("benchmarks/compile_kernels.py", timeout=1700)
    for capability in (80, 90, 100):
        assert f"sm_{capability}" in out
