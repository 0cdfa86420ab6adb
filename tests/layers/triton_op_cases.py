"""Triton's small operations, products and sampling under the interpreter against torch; run by test_triton.py."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from interpreter_floats import install

from banyan.layers import scaled_linear
from banyan.layers.kernels import ops
from banyan.layers.kernels.triton import launch
from banyan.layers.sampler import draw_params, sample
from banyan.layers.sampling_input import TOP_K_ALL, SamplingInput

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("run with TRITON_INTERPRET=1")
install()

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)]
DIMS = [80, *[pytest.param(dim, marks=pytest.mark.nightly) for dim in (64, 576, 2048)]]
NEAR = {"atol": 2e-5, "rtol": 2e-5}


def near(dtype: torch.dtype) -> dict[str, float]:
    return NEAR if dtype is torch.float32 else dict.fromkeys(("atol", "rtol"), 2e-3 if dtype is torch.float16 else 2e-2)


def drawing(sampling: SamplingInput):
    return lambda logits, best: launch.sample(logits, best, torch.from_numpy(draw_params(sampling)))


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_norms(dim, dtype):
    x, delta, w = noise(3, dim, dtype=dtype), noise(3, dim, dtype=dtype, seed=1), noise(dim, dtype=dtype, seed=2)
    heads = noise(2, 5, dim, dtype=dtype)[:, 1:4]  # strided, as q within a projection
    for ours, theirs in ((launch.rms_norm, ops.rms_norm), (launch.gemma_rms_norm, ops.gemma_rms_norm)):
        for value in (x, heads):
            torch.testing.assert_close(ours(value, w, 1e-5), theirs(value, w, 1e-5), **near(dtype))
    for ours, theirs in ((launch.add_rms_norm, ops.add_rms_norm), (launch.gemma_add_rms_norm, ops.gemma_add_rms_norm)):
        torch.testing.assert_close(ours(x, delta, w, 1e-5), theirs(x, delta, w, 1e-5), **near(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS[:2])
def test_rotate(dim, dtype):
    x = noise(3, 20, dim, dtype=dtype)[:, :18]
    tables = noise(3, 1, dim // 2, dtype=dtype, seed=1), noise(3, 1, dim // 2, dtype=dtype, seed=2)
    torch.testing.assert_close(launch.rotate(x, tables), ops.rotate(x, tables), **near(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [96, pytest.param(1500, marks=pytest.mark.nightly)])
def test_gated(inner, dtype):
    x = noise(3, 2 * inner, dtype=dtype)
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        torch.testing.assert_close(getattr(launch, name)(x), getattr(ops.TORCH, name)(x), **near(dtype))


@pytest.mark.parametrize(("m", "n", "k"), [(3, 40, 96), pytest.param(70, 200, 300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_products_are_exact(m, n, k, biased):
    rng = np.random.default_rng(0)
    a = torch.from_numpy(rng.integers(-127, 128, (m, k), dtype=np.int8))
    b = torch.from_numpy(rng.integers(-127, 128, (n, k), dtype=np.int8)).T
    bias = noise(n) if biased else None
    args = (a, b, noise(m).abs(), noise(n, seed=3).abs(), torch.float32)
    torch.testing.assert_close(launch.scaled_mm(*args, bias=bias), ops.scaled_mm(*args, bias=bias), **NEAR)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 40, 96), pytest.param(70, 200, 300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("biased", [False, True])
def test_fp8_products(m, n, k, biased):
    a, b = noise(m, k).to(torch.float8_e4m3fn), noise(n, k, seed=1).to(torch.float8_e4m3fn).T
    bias = noise(n) if biased else None
    args = (a, b, noise(m).abs(), noise(n, seed=3).abs(), torch.float32)
    torch.testing.assert_close(launch.scaled_mm(*args, bias=bias), ops.scaled_mm(*args, bias=bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("m", "n", "k", "group"), [(3, 40, 96, 32), pytest.param(33, 70, 256, 128, marks=pytest.mark.nightly)])
def test_int4_products(m, n, k, group, dtype):
    x = noise(m, k, dtype=dtype)
    packed = ops.pack_int4(torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(1)), group)
    scales, minimums, bias = noise(n, k // group, seed=2).abs(), noise(n, k // group, seed=4), noise(n, seed=3)
    expected = ops.int4_mm(x, packed, scales, minimums, group=group, bias=bias)
    near = 2e-4 if dtype is torch.float32 else 2e-2
    got = launch.int4_mm(x, packed, scales, minimums, group=group, bias=bias)
    torch.testing.assert_close(got, expected, atol=near, rtol=near)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dim", DIMS[:2])
def test_quantised_rows(dim, kind, dtype):
    x = noise(5, dim + 8, dtype=dtype)[:, :dim]
    x[1], x[2, 1], x[3] = 0, 1000, x[3] * 1e-4
    (q, scale), (expected, expected_scale) = launch.quantize(x, kind), ops.quantize(x, kind)
    assert torch.equal(scale, expected_scale) and scale[1] == 0 and not q[1].float().any()
    assert torch.equal(q.float(), expected.float())


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_linears_compute_what_they_do_in_torch(quantization):
    w, bias, x = noise(40, 80), noise(40, seed=1), noise(3, 80, seed=2)
    ours, theirs = (
        scaled_linear.DeviceFormat(quantization, kernels).pack(w, bias, {}) for kernels in (ops.triton_ops(), ops.TORCH)
    )
    assert torch.equal(ours.weight.view(torch.uint8), theirs.weight.view(torch.uint8)) and torch.equal(ours.scale, theirs.scale)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)


MIXES = [  # temperature, top_p, top_k, min_p
    (0.0, 1.0, TOP_K_ALL, 0.0),
    (0.7, 0.9, TOP_K_ALL, 0.0),
    (1.0, 0.6, 20, 0.05),
    (1.0, 1.0, TOP_K_ALL, 0.0),
    (1.3, 1.0, 7, 0.0),
    (1.0, 1.0, TOP_K_ALL, 0.1),
    (0.9, 0.95, 30, 0.05),
    (1.0, 0.001, 5, 0.0),
    (2.0, 0.999, 1, 0.3),
]


def check_draws(
    vocabulary: int,
    seeds: range,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ties: bool,
    mixes: list[tuple[float, float, int, float]] = MIXES,
) -> None:
    """Rows of every mix of parameters: the ids are those of the reference, which sorts in float64."""
    monkeypatch.setattr(launch, "SAMPLE_BLOCK", 128)
    for seed in seeds:
        logits = noise(len(mixes), vocabulary, seed=seed) * 3
        if ties:
            logits = logits.round()
        logits[:, 3::7] = float("-inf")
        columns = [np.array(column) for column in zip(*mixes, strict=True)]
        sampling = SamplingInput(
            columns[0].astype(np.float32),
            columns[1].astype(np.float32),
            columns[2].astype(np.int32),
            columns[3].astype(np.float32),
            np.arange(len(mixes), dtype=np.int64) + 100 * seed,
            np.full(len(mixes), 5, np.int64),
        )
        expected = sample(logits.clone(), sampling)
        got = sample(logits.clone(), sampling, draw=drawing(sampling))
        assert got.tolist() == expected.tolist()


def test_draws(monkeypatch):
    check_draws(130, range(1), monkeypatch, ties=True, mixes=MIXES[:3])


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_of_many_rows(ties, monkeypatch):
    check_draws(1000, range(4), monkeypatch, ties=ties)


def test_rows_that_cannot_be_sampled(monkeypatch):
    monkeypatch.setattr(launch, "SAMPLE_BLOCK", 128)
    logits = noise(3, 50)
    logits[0, 4], logits[1, :] = float("nan"), float("-inf")
    params = [np.full(3, value) for value in (np.float32(1.0), np.float32(0.9), np.int32(10), np.float32(0.1), 5, 6)]
    sampling = SamplingInput(*params)
    assert sample(logits.clone(), sampling, draw=drawing(sampling)).tolist() == sample(logits.clone(), sampling).tolist()
