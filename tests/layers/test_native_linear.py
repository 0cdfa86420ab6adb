"""Every packed linear against torch, at every instruction set that this CPU has."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from banyan.layers.kernels.cpu.build import BuildError, supported_levels
from banyan.layers.kernels.cpu.library import Native, load
from banyan.layers.kernels.cpu.packed import Kind, PackedLinear, PackedWeight
from banyan.layers.quantization import quantized_values_
from banyan.model_executor.gguf_quants import dequantize

SHAPES = [(1, 1), (3, 7), (16, 32), (33, 96), (70, 130), (192, 576)]  # (n, k): a single value, uneven, whole blocks
FLOATS = [Kind.F32, Kind.BF16]
FROM_FLOATS = [*FLOATS, Kind.I8, Kind.Q4]
BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
GROUPS = {Kind.I8: 1 << 30}  # values of x that share a scale, else 32


@pytest.fixture(params=supported_levels())
def native(request: pytest.FixtureRequest) -> Native:
    try:
        return load(request.param)
    except BuildError as error:
        if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            raise  # sources that do not compile are a fault, a machine without a compiler is not
        pytest.skip(str(error))


def tensors(n: int, k: int, m: int, *, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(n * 1000 + k * 10 + m)
    w, x, b = (torch.randn(*shape, generator=generator) for shape in ((n, k), (m, k), (n,)))
    return w, x, b if bias else None


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_torch(native: Native, kind: Kind, shape: tuple[int, int], bias: bool) -> None:
    for m in (1, 2, 3, 5, 13, 70):
        w, x, b = tensors(*shape, m, bias=bias)
        packed = PackedWeight.pack(native, kind, w)
        values = packed.unpack()
        assert torch.equal(values, w if kind is Kind.F32 else w.bfloat16().float())
        if native.isa == "avx512_bf16" and kind is Kind.BF16:
            x = x.bfloat16().float()
        expected = F.linear(x.double(), values.double(), None if b is None else b.double())
        got = PackedLinear([packed], b)(x)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_q8_of_floats_is_near_them(native: Native, shape: tuple[int, int]) -> None:
    w, x, _ = tensors(*shape, 3, bias=False)
    packed = PackedWeight.pack(native, Kind.Q8, w)
    values = packed.unpack()
    assert float((values - w).abs().max()) <= float(w.abs().max()) / 127
    expected = F.linear(rounded(x, Kind.Q8).double(), values.double())
    torch.testing.assert_close(PackedLinear([packed], None)(x).double(), expected, rtol=1e-5, atol=1e-4 * shape[1] ** 0.5)
    with pytest.raises(ValueError, match="blocks of a file"):
        PackedWeight.pack(native, Kind.Q6K, torch.ones(2, 256))


def file_blocks(type_name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random bytes of a GGUF tensor, its scales near 1."""
    values, size, halves = BLOCKS[type_name]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n * k // values, size), np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = rng.uniform(-2, 2, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks


def rounded(x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """What the integer kernels make of activations."""
    m, k = x.shape
    group = min(GROUPS.get(kind, 32), k)
    parts = F.pad(x, (0, -k % group)).view(m, -1, group)
    scale = parts.abs().amax(2, keepdim=True) * torch.tensor(1.0 / 127)
    return (torch.round(parts * torch.where(scale > 0, 1 / scale, 0)).clamp(-127, 127) * scale).view(m, -1)[:, :k]


@pytest.mark.parametrize("kind", [Kind.I8, Kind.Q4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_the_values_that_torch_falls_back_to(native: Native, kind: Kind, shape: tuple[int, int]) -> None:
    for m in (1, 2, 3, 5, 13, 70):
        w, x, b = tensors(*shape, m, bias=m % 2 == 1)
        packed = PackedWeight.pack(native, kind, w)
        quantized_values_(w, kind)
        assert torch.equal(packed.unpack(), w)
        expected = F.linear(rounded(x, kind).double(), w.double(), None if b is None else b.double())
        got = PackedLinear([packed], b)(x)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4 * shape[1] ** 0.5)


@pytest.mark.parametrize("type_name", BLOCKS)
def test_blocks_of_a_gguf_file_stay_what_they_are(native: Native, type_name: str) -> None:
    for n, k in ((3, 256), (40, 768)) if type_name.endswith("K") else ((3, 32), (40, 96)):
        blocks = file_blocks(type_name, n, k)
        packed = PackedWeight.of_blocks(native, type_name, torch.from_numpy(blocks).view(n, -1), k)
        values = torch.from_numpy(dequantize(blocks.reshape(-1), type_name)).view(n, k)
        assert torch.equal(packed.unpack(), values)
        linear = PackedLinear([packed], None)
        x = torch.randn(70, k, generator=torch.Generator().manual_seed(n))
        whole = linear(x)
        expected = F.linear(rounded(x, packed.kind).double(), values.double())
        torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        for m in (1, 2, 3, 7):
            assert torch.equal(linear(x[:m]), whole[:m])


@pytest.mark.parametrize("kind", [Kind.I8, Kind.Q4])
def test_the_largest_integers_do_not_overflow(native: Native, kind: Kind) -> None:
    w, x = torch.ones(20, 256), torch.ones(3, 256)
    w[1::2], x[1] = -1, -1
    w[:, ::32] *= 0.5 if kind is Kind.Q4 else 1
    packed = PackedWeight.pack(native, kind, w)
    torch.testing.assert_close(PackedLinear([packed], None)(x), F.linear(x, packed.unpack()), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", FROM_FLOATS)
def test_activations_that_are_not_finite_spoil_their_row_alone(native: Native, kind: Kind) -> None:
    w, x, _ = tensors(33, 96, 4, bias=False)
    linear = PackedLinear([PackedWeight.pack(native, kind, w)], None)
    clean = linear(x)
    x[1, 40], x[2, 95] = float("nan"), float("inf")
    spoilt = linear(x)
    assert not torch.isfinite(spoilt[1:3]).any()
    assert torch.equal(spoilt[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("kind", FROM_FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(native: Native, kind: Kind, shape: tuple[int, int]) -> None:
    w, x, b = tensors(*shape, 70, bias=True)
    linear = PackedLinear([PackedWeight.pack(native, kind, w)], b)
    whole = linear(x)
    for m in (*range(1, 15), 33, 69):
        assert torch.equal(linear(x[:m]), whole[:m])
        assert torch.equal(linear(x[-m:]), whole[-m:])


@pytest.mark.parametrize("kind", FROM_FLOATS)
@pytest.mark.parametrize("shape", [(100, 289), (53, 640)], ids=str)
def test_many_rows_are_the_rows_one_by_one(native: Native, kind: Kind, shape: tuple[int, int]) -> None:
    """More rows and longer ones than a block holds, on one thread and on more."""
    w, x, b = tensors(*shape, 281, bias=True)
    linear = PackedLinear([PackedWeight.pack(native, kind, w)], b)
    single = torch.cat([linear(row[None]) for row in x])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for m in (12, 48, 281):
                assert torch.equal(linear(x[:m]), single[:m])
    finally:
        torch.set_num_threads(threads)


def test_bfloat16_weights_are_packed_as_they_are(native: Native) -> None:
    w = torch.randn(40, 33).bfloat16()
    assert torch.equal(PackedWeight.pack(native, Kind.BF16, w).unpack(), w.float())


def test_parts_of_different_kinds_follow_each_other(native: Native) -> None:
    w, x, b = tensors(80, 64, 5, bias=True)
    parts = [(Kind.F32, w[:30]), (Kind.BF16, w[30:47]), (Kind.I8, w[47:60]), (Kind.Q4, w[60:])]
    linear = PackedLinear([PackedWeight.pack(native, kind, part) for kind, part in parts], b)
    values = torch.cat([part.unpack() for part in linear.weights])
    torch.testing.assert_close(linear(x), F.linear(x, values, b), rtol=2e-2, atol=0.2)


def test_rows_may_lie_apart(native: Native) -> None:
    w, x, _ = tensors(24, 48, 9, bias=False)
    linear = PackedLinear([PackedWeight.pack(native, Kind.F32, w)], None)
    assert torch.equal(linear(torch.cat([x, x], dim=1)[:, 48:]), linear(x))
    assert linear(x[:0]).shape == (0, 24)
    with pytest.raises(ValueError, match="got"):
        linear(x[:, :40])
