"""The code for AVX-512 on a CPU without it: the tests of the kernels, run over functions that do what its instructions do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_avx512 import SIMDE

from banyan.layers.kernels.cpu.build import LEVELS, cpu_flags

TESTS = Path(__file__).parent.parent
SUITES = (
    "layers/test_native_linear.py",
    "layers/test_native_small_ops.py",
    "layers/test_native_sampler.py",
    "layers/test_attention_conformance.py",
)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SIMDE.exists(), reason="SIMDe's headers are not installed (Debian: libsimde-dev)")
@pytest.mark.skipif("avx2" not in cpu_flags(), reason="the emulation is built for AVX2")
@pytest.mark.skipif(set(LEVELS["avx512_bf16"][0]) <= cpu_flags(), reason="this CPU runs the code itself, in the tests proper")
def test_the_code_for_avx512_passes_what_the_others_do() -> None:
    path = os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = ["-q", "-x", "-p", "emulated_avx512", "-p", "no:cacheprovider", "-k", "not torch_native"]
    command = [sys.executable, "-m", "pytest", *options, *(str(TESTS / suite) for suite in SUITES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
