"""Every packed linear against torch, at every instruction set that this CPU has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from banyan.layers.kernels.cpu.build import BuildError, supported_levels
from banyan.layers.kernels.cpu.library import Native, load
from banyan.layers.kernels.cpu.packed import Kind, PackedLinear, PackedWeight

SHAPES = [(1, 1), (3, 7), (16, 32), (33, 96), (70, 130), (192, 576)]  # (n, k): a single value, uneven, whole blocks
FLOATS = [Kind.F32, Kind.BF16]


@pytest.fixture(params=supported_levels())
def native(request: pytest.FixtureRequest) -> Native:
    try:
        return load(request.param)
    except BuildError as error:
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


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(native: Native, kind: Kind, shape: tuple[int, int]) -> None:
    w, x, b = tensors(*shape, 70, bias=True)
    linear = PackedLinear([PackedWeight.pack(native, kind, w)], b)
    whole = linear(x)
    for m in (*range(1, 15), 33, 69):
        assert torch.equal(linear(x[:m]), whole[:m])
        assert torch.equal(linear(x[-m:]), whole[-m:])


def test_bfloat16_weights_are_packed_as_they_are(native: Native) -> None:
    w = torch.randn(40, 33).bfloat16()
    assert torch.equal(PackedWeight.pack(native, Kind.BF16, w).unpack(), w.float())


def test_parts_of_different_kinds_follow_each_other(native: Native) -> None:
    w, x, b = tensors(80, 64, 5, bias=True)
    parts = [(Kind.F32, w[:30]), (Kind.BF16, w[30:47]), (Kind.F32, w[47:])]
    linear = PackedLinear([PackedWeight.pack(native, kind, part) for kind, part in parts], b)
    values = torch.cat([part.unpack() for part in linear.weights])
    torch.testing.assert_close(linear(x), F.linear(x, values, b), rtol=2e-2 if native.isa == "avx512_bf16" else 1e-5, atol=1e-3)


def test_rows_may_lie_apart(native: Native) -> None:
    w, x, _ = tensors(24, 48, 9, bias=False)
    linear = PackedLinear([PackedWeight.pack(native, Kind.F32, w)], None)
    assert torch.equal(linear(torch.cat([x, x], dim=1)[:, 48:]), linear(x))
    assert linear(x[:0]).shape == (0, 24)
    with pytest.raises(ValueError, match="got"):
        linear(x[:, :40])
