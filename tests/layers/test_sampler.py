from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import naive, params

from banyan.layers.sampler import sample
from banyan.layers.sampling_input import FAILED, NO_CHOICE, TOP_K_ALL


@given(
    data=st.data(),
    vocab=st.integers(2, 60),
    num_candidates=st.sampled_from([1, 3, 8, 1024]),
    scale=st.sampled_from([0.0, 0.3, 2.0, 10.0]),
)
@settings(max_examples=150, deadline=None)
def test_equals_the_naive_reference(data, vocab, num_candidates, scale):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    rows = 6
    logits = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # ties
    p = params(
        rows,
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7], rows),
        top_p=rng.choice([1.0, 0.9, 0.5, 1e-4], rows),
        top_k=rng.choice([TOP_K_ALL, 1, 2, 7, vocab], rows),
        min_p=rng.choice([0.0, 0.05, 0.5, 1.0], rows),
        seed=rng.integers(-(2**63), 2**63 - 1, rows),
        position=rng.integers(0, 10_000, rows),
        banned=[(row, int(rng.integers(vocab))) for row in range(0, rows, 2)],
    )
    got = sample(torch.from_numpy(logits.copy()), p, num_candidates=num_candidates).tolist()
    for row in range(rows):
        expected, edge = naive(logits[row], p, row)
        assert got[row] == expected or edge < 1e-5, (row, got[row], expected, edge)


def test_large_vocabulary_takes_both_paths_alike():
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((24, 5000)).astype(np.float32))
    p = params(
        24,
        top_p=np.tile([1.0, 0.2, 0.99], 8),
        top_k=np.tile([TOP_K_ALL, 100, 3000, TOP_K_ALL], 6),
        min_p=np.repeat([0.0, 0.01], 12),
        seed=np.arange(24),
    )
    few = sample(logits.clone(), p, num_candidates=64)
    assert (
        few.tolist()
        == sample(logits.clone(), p, num_candidates=1024).tolist()
        == sample(logits.clone(), p, num_candidates=5000).tolist()
    )
    assert few.tolist() == [naive(logits[row].numpy(), p, row)[0] for row in range(24)]


def test_a_row_is_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(5)
    rows = 16
    logits = torch.from_numpy((rng.standard_normal((rows, 40_000)) * 3).astype(np.float32))
    temperature, top_p = rng.choice([0.0, 0.7, 1.3], rows), rng.choice([1.0, 0.95, 0.3], rows)
    together = sample(logits.clone(), params(rows, temperature=temperature, top_p=top_p, seed=np.arange(rows), position=7))
    for row in range(rows):
        alone = params(1, temperature=temperature[row], top_p=top_p[row], seed=row, position=7)
        assert sample(logits[row : row + 1].clone(), alone).tolist() == [together[row].item()]
    order = rng.permutation(rows)
    shuffled = params(rows, temperature=temperature[order], top_p=top_p[order], seed=np.arange(rows)[order], position=7)
    assert sample(logits[order].clone(), shuffled).tolist() == together[order].tolist()


def test_the_seed_and_the_position_determine_the_draw():
    logits = torch.zeros(1, 1000)
    draws = [sample(logits.clone(), params(1, seed=s, position=i)).item() for s in (1, 2) for i in range(20)]
    assert draws == [sample(logits.clone(), params(1, seed=s, position=i)).item() for s in (1, 2) for i in range(20)]
    assert len(set(draws)) > 30


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    n = 20_000
    ids = sample(logits.repeat(n, 1), params(n, position=np.arange(n)), num_candidates=2)
    counts = np.bincount(ids.numpy(), minlength=4) / n
    assert np.abs(counts - torch.softmax(logits[0], -1).numpy()).max() < 0.015


@pytest.mark.parametrize(("temperature", "samples"), [(0.0, False), (9e-7, False), (2e-6, True), (1.0, True)])
def test_only_temperatures_below_the_epsilon_are_greedy(temperature, samples):
    """SA-02."""
    logits = torch.tensor([[0.0, 1e-9, 1e-9]]).repeat(200, 1)  # so flat that any sampling spreads
    ids = sample(logits, params(200, temperature=temperature, position=np.arange(200)))
    assert (len(set(ids.tolist())) > 1) is samples
    assert samples or set(ids.tolist()) == {1}, "greedy takes the first of equals"


def test_a_row_that_is_not_finite_fails_alone():
    good = torch.tensor([0.0, 3.0, 1.0, -2.0])
    logits = good.repeat(7, 1)
    logits[1, 2] = float("nan")
    logits[2, 0] = float("inf")
    logits[3] = float("-inf")
    logits[4, 1] = float("-inf")
    for temperature in (0.0, 1.0):
        ids = sample(logits.clone(), params(7, temperature=temperature, top_k=2))
        assert ids[1:4].tolist() == [FAILED, FAILED, NO_CHOICE]
        alone = sample(good[None].clone(), params(1, temperature=temperature, top_k=2)).item()
        assert ids[[0, 5, 6]].tolist() == [alone] * 3
        assert ids[4].item() in (0, 2)


def test_banned_ids_are_never_chosen_and_a_row_without_any_id_fails():
    logits = torch.tensor([[5.0, 1.0, 0.0]]).repeat(100, 1)
    banned = [(row, 0) for row in range(100)]
    ids = sample(logits.clone(), params(100, position=np.arange(100), banned=banned))
    assert set(ids.tolist()) == {1, 2}
    assert sample(logits[:1].clone(), params(1, temperature=0.0, banned=banned[:1])).tolist() == [1]
    assert sample(logits[:1].clone(), params(1, banned=[(0, 0), (0, 1), (0, 2)])).tolist() == [NO_CHOICE]


def test_no_rows():
    assert sample(torch.empty(0, 10), params(0)).shape == (0,)
