"""Linears in oneDNN's order against torch's own product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from banyan.layers import onednn
from banyan.layers.embedding import Embedding
from banyan.layers.linear import Linear, MergedLinear
from banyan.layers.onednn import ReorderedLinear, why_not_reordered

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if why_not_reordered(dtype) is None]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 7), (70, 130), (192, 576)])
def test_agrees_with_torch(n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    weight, b = random(n, k, dtype=dtype), random(n, dtype=dtype, seed=1) if bias else None
    linear = ReorderedLinear(weight, b)
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] * k**0.5
    for rows in (0, 1, 2, 9, 70):
        x = random(rows, k, dtype=dtype, seed=2)
        y = linear(x)
        assert y.dtype is dtype and y.shape == (rows, n)
        torch.testing.assert_close(y, F.linear(x, weight, b), atol=close, rtol=1e-5 if dtype is torch.float32 else 2e-2)
    assert linear.nbytes == n * k * dtype.itemsize


@torch.inference_mode()
def test_layers_keep_their_results(dtype: torch.dtype) -> None:
    """A linear keeps its weight in one form only; a head that is an embedding keeps its rows for the lookup."""
    for layer in (Linear(24, 40, bias=True, dtype=dtype), MergedLinear(24, (16, 8), bias=False, dtype=dtype)):
        for parameter in layer.parameters():
            parameter.copy_(random(*parameter.shape, dtype=dtype))
        x = random(5, 24, dtype=dtype, seed=3)
        before = layer(x)
        layer.reorder()
        assert layer.weight.numel() == 0
        torch.testing.assert_close(layer(x), before)
    table = Embedding(30, 24, dtype=dtype)
    table.weight.copy_(random(30, 24, dtype=dtype))
    logits, rows = table.project(x), table(torch.tensor([3, 7]))
    table.reorder()
    torch.testing.assert_close(table.project(x), logits)
    assert torch.equal(table(torch.tensor([3, 7])), rows)


def test_where_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_reordered(torch.float16) == "not for float16"
    monkeypatch.setattr(onednn.torch.backends.mkldnn, "is_available", lambda: False)
    assert why_not_reordered.__wrapped__(torch.float32) == "this torch has no oneDNN"
    monkeypatch.undo()

    def gone(*_: object) -> torch.Tensor:
        raise AttributeError("no operator of this name\nmore")

    monkeypatch.setattr(onednn, "ReorderedLinear", gone)
    assert why_not_reordered.__wrapped__(torch.float32) == "no operator of this name"
