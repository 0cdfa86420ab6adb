"""The native sampler against torch's where it sorts and weighs all in float64: equal ids, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch
from sampling_cases import mixed_params, naive, params

from banyan.layers.kernels.cpu.build import supported_levels
from banyan.layers.kernels.cpu.library import Native, load
from banyan.layers.late_mask import LateMask
from banyan.layers.sampler import sample
from banyan.layers.sampling_input import FAILED, NO_CHOICE, TOP_K_ALL, SamplingInput

NATIVE = load(supported_levels()[-1])


@pytest.fixture(params=supported_levels())
def native(request) -> Native:
    return load(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def by_torch(logits: torch.Tensor, sampling: SamplingInput) -> list[int]:
    return sample(logits.clone(), sampling, num_candidates=logits.shape[1]).tolist()


def by_kernel(native: Native, logits: torch.Tensor, sampling: SamplingInput) -> list[int]:
    return sample(logits.clone(), sampling, choose=native.choose).tolist()


def noise(rows: int, vocab_size: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def taken(sampling: SamplingInput, rows: np.ndarray) -> SamplingInput:
    names = [field.name for field in fields(sampling)][:6]
    return SamplingInput(*(getattr(sampling, name)[rows] for name in names))


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1003, 5000])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 4.0, 200.0])
@pytest.mark.parametrize("with_ties", [False, True])
def test_ids_are_those_of_torch(native, vocab_size, scale, with_ties):
    rng = np.random.default_rng(vocab_size)
    rows = 40
    logits = noise(rows, vocab_size, scale, seed=vocab_size)
    sampling = mixed_params(rows, vocab_size, rng)
    if with_ties:
        logits = (logits * 2).round()
    logits[::7, : vocab_size // 2] = float("-inf")
    assert by_kernel(native, logits, sampling) == by_torch(logits, sampling)


@pytest.mark.parametrize(("vocab_size", "rows"), [(49_152, 24), (262_144, 8)])
def test_large_vocabularies(native, vocab_size, rows):
    sampling = mixed_params(rows, vocab_size, np.random.default_rng(1))
    sampling.temperatures[:4], sampling.top_ks[:4] = 1.0, TOP_K_ALL
    logits = noise(rows, vocab_size, 2.5)
    got = by_kernel(native, logits, sampling)
    assert got == by_torch(logits, sampling)
    assert got == sample(logits.clone(), sampling).tolist(), "the candidates that torch takes in a server"
    naively = [naive(logits[row].numpy(), sampling, row) for row in range(rows)]
    assert all(got[row] == expected or edge < 1e-5 for row, (expected, edge) in enumerate(naively))


def edge_logits() -> dict[str, torch.Tensor]:
    one = torch.full((70,), float("-inf"))
    one[41] = -3.0
    steps = torch.arange(70.0)
    return {
        "all but one are -inf": one,
        "all are equal": torch.full((70,), 2.5),
        "the greatest floats": torch.tensor([3.4e38, -3.4e38, 0.0, 3.3e38, -1e30]).repeat(14),
        "zeros of both signs": torch.tensor([0.0, -0.0, -1e-40, 1e-40]).repeat(18),
        "the next float": torch.nextafter(torch.ones(70), torch.tensor([1.0, 2.0]).repeat(35)),
        "steps": -steps,
        "steps of 100": -steps * 100,
        "one tops all": torch.nn.functional.pad(torch.zeros(69), (1, 0), value=80.0),
    }


@pytest.mark.parametrize("name", edge_logits())
def test_edges(native, name):
    logits = edge_logits()[name]
    values = {
        "temperature": [1e-6, 1e-5, 0.01, 1.0, 100.0, 1e6, 3e38],
        "top_k": [2, 30, 69, 70, TOP_K_ALL],
        "top_p": [1.0, 1 - 2**-24, 0.9, 0.5, 1e-6, 1e-38],
        "min_p": [0.0, 1e-38, 0.1, 0.999, 1.0],
    }
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*values.values(), indexing="ij")])
    rows = grid.shape[1]
    sampling = params(rows, **dict(zip(values, grid, strict=True)), seed=np.arange(rows))
    batch = logits.repeat(rows, 1)
    got = by_kernel(native, batch, sampling)
    assert got == by_torch(batch, sampling)
    assert bool(torch.isfinite(logits[got]).all())


def test_rows_without_a_choice(native):
    logits = noise(9, 1003)
    logits[1, 1002] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    logits[4, :500] = float("-inf")
    for temperature in (0.0, 1.0):
        got = by_kernel(native, logits, params(9, temperature=temperature, top_k=[TOP_K_ALL] * 8 + [1]))
        assert got[1:4] == [FAILED, FAILED, NO_CHOICE]
        assert got == by_torch(logits, params(9, temperature=temperature, top_k=[TOP_K_ALL] * 8 + [1]))


@pytest.mark.parametrize("vocab_size", [1, 5, 1003, 4096])
def test_greedy_choices(native, vocab_size):
    logits = noise(9, vocab_size)
    last = vocab_size - 1
    logits[1, [last // 2, last]] = 9.0  # equals: the lower one
    logits[2, last] = 9.0
    logits[3, last // 3] = float("nan")
    logits[4] = float("-inf")
    logits[5, last // 4] = float("inf")
    logits[6, : last // 2] = float("-inf")
    logits[7] = 0.0
    logits[8] = -logits[8].abs()
    assert by_kernel(native, logits, params(9, temperature=0.0)) == by_torch(logits, params(9, temperature=0.0))


def test_bans_and_masks_come_before(native):
    rng = np.random.default_rng(8)
    logits, rows = noise(12, 700, 3.0), np.array([0, 3, 4, 11], np.int32)
    sampling = mixed_params(12, 700, rng)
    sampling.banned_rows, sampling.banned_ids = np.repeat(np.arange(12, dtype=np.int32), 9), rng.integers(0, 700, 108, np.int32)
    bits = rng.integers(-(2**31), 2**31 - 1, (4, 22), np.int32)
    bits[1] = 0
    bits[1, 5] = 1 << 9  # one token alone
    sampling.allowed = LateMask(rows)
    sampling.allowed.fill(bits)
    got = by_kernel(native, logits, sampling)
    assert got == by_torch(logits, sampling) and got[3] in (5 * 32 + 9, NO_CHOICE)


def test_every_instruction_set_gives_the_same_bits():
    """Where rounding decides: flat rows, and tens of thousands of draws."""
    rows, libraries = 3000, [load(level) for level in supported_levels()]
    logits = noise(1, 2048, 1e-2).repeat(rows, 1)
    sampling = params(rows, top_p=np.tile([1.0, 0.9], rows // 2), position=np.arange(rows))
    first, *others = [by_kernel(library, logits, sampling) for library in libraries]
    assert all(other == first for other in others)


def test_a_row_is_the_same_in_any_batch_and_with_any_number_of_threads(native, threads):
    rng = np.random.default_rng(2)
    logits, sampling = noise(33, 9000, 2.0), mixed_params(33, 9000, rng)
    torch.set_num_threads(1)
    expected = by_kernel(native, logits, sampling)
    for count in (3, 2, 1):
        torch.set_num_threads(count)
        order = rng.permutation(33)[: 33 - 5 * count]
        assert by_kernel(native, logits[order], taken(sampling, order)) == [expected[row] for row in order]
        assert by_kernel(native, logits[:1], taken(sampling, np.arange(1))) == expected[:1]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({}, 600), ({"top_k": 20}, 20), ({"top_p": 0.4}, None), ({"min_p": 0.3}, None), ({"temperature": 1.6}, 600)],
)
def test_frequencies_follow_the_probabilities(filters, kept):
    """Chi-square over 40,000 draws: the statistic stays within 5 standard deviations of its mean (seeds are fixed)."""
    draws = 40_000
    logits = noise(1, 600, 0.7)
    weights = np.exp(logits[0].double().numpy() / filters.get("temperature", 1.0))
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order] / weights.sum()
    if "top_p" in filters:
        kept = int((np.cumsum(ranked) - ranked < filters["top_p"]).sum())
    if "min_p" in filters:
        kept = int((ranked >= filters["min_p"] * ranked[0]).sum())
    expected = ranked[:kept] / ranked[:kept].sum() * draws
    got = np.concatenate(
        [
            by_kernel(NATIVE, logits.repeat(4000, 1), params(4000, position=np.arange(4000) + i, **filters))
            for i in range(0, draws, 4000)
        ]
    )
    counts = np.bincount(got, minlength=600)[order]
    assert not counts[kept:].any()
    statistic, freedom = float(((counts[:kept] - expected) ** 2 / expected).sum()), kept - 1
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_no_rows(native):
    assert native.choose(torch.empty(0, 10), params(0)).shape == (0,)


def test_rows_may_lie_apart(native):
    wide = noise(6, 300)
    assert by_torch(wide[:, 40:240].contiguous(), params(6, seed=4)) == native.choose(wide[:, 40:240], params(6, seed=4)).tolist()


@pytest.mark.parametrize("logits", [torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8, 2).T, torch.zeros(3, 8)])
def test_what_is_not_rows_of_floats_is_refused(logits):
    with pytest.raises(ValueError, match="must be"):
        NATIVE.choose(logits, params(2))
