"""Masks of tokens on logits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from banyan.layers import token_mask
from banyan.layers.kernels.cpu.library import NotNative, native_kernels
from banyan.layers.late_mask import LateMask
from banyan.layers.token_mask import apply_mask

V = 77


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(token_mask, "native_kernels", lambda: NotNative("off"))
    elif isinstance(native_kernels(), NotNative):
        pytest.skip("no native kernels")


def mask_of(rows: list[int], allowed: list[set[int]]) -> LateMask:
    flags = np.zeros((len(rows), 96), np.bool_)
    for index, ids in enumerate(allowed):
        flags[index, sorted(ids)] = True
    mask = LateMask(np.array(rows))
    mask.fill(np.packbits(flags, axis=1, bitorder="little").view("<i4"))
    return mask


def test_only_what_is_allowed_stays() -> None:
    logits = torch.randn(4, V)
    before = logits.clone()
    allowed = [{0, 31, 32, 76}, set()]
    apply_mask(logits, mask_of([1, 3], allowed))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, ids in ((1, allowed[0]), (3, allowed[1])):
        for token in range(V):
            assert logits[row, token] == (before[row, token] if token in ids else float("-inf"))


def test_a_nan_is_not_hidden() -> None:
    logits = torch.zeros(1, V)
    logits[0, 5] = float("nan")
    apply_mask(logits, mask_of([0], [{4}]))
    assert logits[0, 5].isnan()


def test_it_waits_for_the_mask() -> None:
    logits, mask = torch.zeros(1, V), LateMask(np.array([0]))
    thread = threading.Thread(target=apply_mask, args=(logits, mask))
    thread.start()
    mask.fill(np.zeros((1, 3), np.int32))
    thread.join(10)
    assert not thread.is_alive() and (logits == float("-inf")).all()


def test_a_mask_that_is_too_short() -> None:
    mask = LateMask(np.array([0]))
    mask.fill(np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="64"):
        apply_mask(torch.zeros(1, V), mask)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1003, 4096])
def test_random_masks(vocab_size: int) -> None:
    """Against the definition, in rows of a wider tensor; words without and with all bits among them."""
    draw = np.random.default_rng(vocab_size)
    wide = torch.randn(9, vocab_size + 5)
    logits = wide[:, 3 : vocab_size + 3]
    before, rows = wide.clone(), np.array([0, 2, 3, 7, 8])
    bits = draw.integers(-(1 << 31), 1 << 31, (5, (vocab_size + 31) // 32)).astype(np.int32)
    bits[draw.random(bits.shape) < 0.3] = -1
    bits[draw.random(bits.shape) < 0.3] = 0
    mask = LateMask(rows)
    mask.fill(bits)
    expected = before.clone()
    for index, row in enumerate(rows.tolist()):
        for token in range(vocab_size):
            if not int(bits[index, token // 32]) >> (token % 32) & 1:
                expected[row, token + 3] = float("-inf")
    apply_mask(logits, mask)
    assert torch.equal(wide, expected)


def test_a_row_that_is_not_there() -> None:
    with pytest.raises(IndexError):
        apply_mask(torch.zeros(1, V), mask_of([3], [{1}]))
