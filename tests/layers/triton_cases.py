"""Triton kernels under the interpreter against torch. Not collected by itself: test_triton.py runs it in a process of its own, as
TRITON_INTERPRET must be set before a kernel's module is imported."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_batches import BATCHES, make_batch, pools
from interpreter_floats import install

from banyan.layers.attention.base import AttentionSpec
from banyan.layers.attention.torch_native import TorchNativeBackend
from banyan.layers.attention.triton import TritonBackend

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("run with TRITON_INTERPRET=1")
install()

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclasses.dataclass
class Case:
    batch: str
    group: int
    dim: int
    page: int = 1
    window: int | None = None
    cap: float | None = None
    dtype: torch.dtype = torch.float32
    kv: torch.dtype | None = None  # of the pool, if another


def check(case: Case, capture: bool = False) -> None:
    rng = np.random.default_rng(0)
    batch, num_slots = make_batch(*BATCHES[case.batch], page=case.page, rng=rng)
    kv_heads = 2
    heads = kv_heads * case.group
    spec = AttentionSpec(
        layer_id=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=case.dim,
        scale=case.dim**-0.5,
        sliding_window=case.window,
        soft_cap=case.cap,
    )
    ours, theirs = pools(num_slots, case.page, kv_heads, case.dim, case.kv or case.dtype, case.dtype)
    qkv = torch.from_numpy(rng.standard_normal((int(batch.extend_lens_host.sum()), heads + 2 * kv_heads, case.dim))).to(case.dtype)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    reference = TorchNativeBackend(theirs)
    reference.plan(batch)
    expected = reference.forward(q, k, v, spec, batch)
    backend = TritonBackend(ours)
    if capture:
        backend.plan_capture(batch)
        backend.plan_replay(batch)
    else:
        backend.plan(batch)
    got = backend.forward(q, k, v, spec, batch)
    for mine, other in ((ours.k(1), theirs.k(1)), (ours.v(1), theirs.v(1))):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    torch.testing.assert_close(got, expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


def conformance():
    """The module whose cases every backend passes."""
    spec = importlib.util.spec_from_file_location("conformance", Path(__file__).with_name("test_attention_conformance.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CONFORMANCE = conformance()
PLAIN = {name: case for name, case in CONFORMANCE.CASES.items() if case.kv is torch.float32}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLAIN)
def test_conformance(name, monkeypatch):
    monkeypatch.setitem(CONFORMANCE.BACKENDS, "triton", CONFORMANCE.Backend(TritonBackend, (torch.float32,)))
    CONFORMANCE.test_equals_the_reference("triton", PLAIN[name])


SAMPLE = [
    Case("decode", 3, 64),
    Case("long decode", 4, 80, page=16, window=270),
    Case("mixed", 3, 64, page=16, cap=2.0),
    Case("few tokens each", 2, 128, window=19, dtype=torch.float16),
    Case("mixed", 3, 64, dtype=torch.bfloat16),
    Case("decode", 3, 64, dtype=torch.bfloat16, kv=torch.float8_e4m3fn),
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_attention(case):
    check(case)


def test_a_recorded_plan_gives_the_same():
    check(Case("long decode", 3, 64), capture=True)


GRID = [
    Case(batch, group, dim, page=page, window=window, cap=cap, dtype=dtype)
    for (batch, (group, dim)), (page, window, cap), dtype in itertools.product(
        itertools.product(BATCHES, [(1, 64), (3, 80), (8, 128), (2, 256)]),
        [(1, None, None), (16, 12, None), (1, 1, 1.5), (16, None, 3.0)],
        [torch.float32, torch.float16, torch.bfloat16],
    )
]
GRID += [
    Case(batch, group, dim, page=page, window=window, dtype=dtype, kv=kv)
    for batch, (group, dim, page, window), dtype, kv in itertools.product(
        BATCHES,
        [(3, 64, 1, None), (8, 128, 16, 12), (1, 80, 16, None)],
        [torch.float16, torch.bfloat16],
        [torch.float8_e4m3fn, torch.float8_e5m2],
    )
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", GRID, ids=str)
def test_attention_grid(case):
    check(case)
