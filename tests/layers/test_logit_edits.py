"""Penalties, bias, allowed ids, bad words and processors against a naive reference, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.layers.logit_edits import LogitEdits
from banyan.layers.logit_processor import load_processors
from banyan.layers.sampling_input import RowControls

VOCAB = 24
CPU = torch.device("cpu")


def controls(prompt: list[int], output: list[int], **more: Any) -> RowControls:
    return RowControls(prompt_ids=np.array(prompt, np.int32), output_ids=np.array(output, np.int32), **more)


def reference(logits: np.ndarray, own: RowControls, output: list[int]) -> np.ndarray:
    logits = logits.astype(np.float64)
    for token in set(output) | set(own.prompt_ids.tolist()):
        logits[token] = logits[token] / own.repetition_penalty if logits[token] > 0 else logits[token] * own.repetition_penalty
    for token in output:
        logits[token] -= own.frequency_penalty
    for token in set(output):
        logits[token] -= own.presence_penalty
    if own.bias_ids is not None:
        logits[own.bias_ids] += own.bias_values
    if own.allowed_ids is not None:
        logits[np.setdiff1d(np.arange(VOCAB), own.allowed_ids)] = -np.inf
    for word in own.bad_words:
        if len(word) == 1 or output[1 - len(word) :] == word[:-1]:
            logits[word[-1]] = -np.inf
    return logits


IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
ROWS = st.fixed_dictionaries(
    {
        "prompt": IDS,
        "output": IDS,
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.7]),
        "frequency_penalty": st.sampled_from([0.0, -1.5, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 2.0, -0.3]),
        "bias_ids": st.none() | st.just(np.array([0, 5, VOCAB - 1], np.int32)),
        "allowed_ids": st.none() | st.just(np.arange(0, VOCAB, 2, dtype=np.int32)),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=3), st.integers(0, 1 << 30), st.integers(0, 7))
def test_equals_the_reference_whatever_the_other_rows_do(rows: list[dict[str, Any]], seed: int, cut: int) -> None:
    """The first ``cut`` output tokens are known when a row is seated, the others are pushed one by one."""
    rng = np.random.default_rng(seed)
    edits = LogitEdits(VOCAB, CPU, {})
    owned = []
    for row in rows:
        prompt, output = row.pop("prompt"), row.pop("output")
        values = np.array([3.0, -4.0, 100.0], np.float32) if row["bias_ids"] is not None else None
        owned.append((controls(prompt, output[:cut], bias_values=values, **row), output))
    order = np.arange(1, len(rows) + 1, dtype=np.int32)
    edits.update({index + 1: own for index, (own, _) in enumerate(owned)})
    for index, (_, output) in enumerate(owned):
        for token in output[cut:]:
            edits.push(order[index : index + 1], torch.tensor([token]))
    plain = len(rows) + 9  # a row without controls
    logits = torch.from_numpy(rng.normal(size=(len(rows) + 1, VOCAB)).astype(np.float32)) * 3
    edited = logits.clone()
    edits.apply(np.append(order, plain), edited)
    assert torch.equal(edited[-1], logits[-1])
    for index, (own, output) in enumerate(owned):
        np.testing.assert_allclose(edited[index], reference(logits[index].numpy(), own, output), rtol=1e-5, atol=1e-5)


def test_many_pushed_tokens_are_all_remembered() -> None:
    edits = LogitEdits(VOCAB, CPU, {})
    own = controls([1], [], frequency_penalty=0.5, bad_words=[[3, 4]])
    edits.update({2: own})
    output = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 1000)] + [3]
    for token in output:
        edits.push(np.array([2], np.int32), torch.tensor([token]))
    logits = torch.zeros(1, VOCAB)
    edits.apply(np.array([2], np.int32), logits)
    np.testing.assert_allclose(logits[0], reference(np.zeros(VOCAB), own, output), rtol=1e-5)


def test_a_new_owner_has_nothing_of_the_old_one() -> None:
    edits = LogitEdits(VOCAB, CPU, {})
    row = np.array([2], np.int32)
    edits.update({2: controls([1], [1, 1], frequency_penalty=2.0)})
    edits.update({2: None})
    logits = torch.ones(1, VOCAB)
    edits.apply(row, logits)
    assert torch.equal(logits, torch.ones(1, VOCAB))
    edits.update({2: controls([3], [], presence_penalty=2.0)})
    edits.apply(row, logits)
    assert torch.equal(logits, torch.ones(1, VOCAB))


class Only:
    """A processor that leaves one token, (last of prompt and output) + step."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.step = params["step"]

    def __call__(self, prompt_ids: torch.Tensor, output_ids: torch.Tensor, logits_V: torch.Tensor) -> torch.Tensor:
        last = int(torch.cat([prompt_ids, output_ids])[-1])
        changed = torch.full_like(logits_V, float("-inf"))
        changed[last + self.step] = 0
        return changed


def test_processors_and_what_becomes_of_one_that_raises() -> None:
    edits = LogitEdits(VOCAB, CPU, {"only": Only})
    edits.update(
        {
            1: controls([5], [], processor="only", custom_params={"step": 2}),
            2: controls([5], [], processor="only"),
            3: controls([VOCAB - 1], [], processor="only", custom_params={"step": 2}),
        }
    )
    rows = np.array([1, 2, 3, 4], np.int32)
    logits = torch.zeros(4, VOCAB)
    edits.apply(rows, logits)
    assert logits[0].argmax() == 7
    assert torch.isnan(logits[1:3]).all()
    assert torch.equal(logits[3], torch.zeros(VOCAB))
    edits.push(rows[:1], torch.tensor([7]))
    edits.apply(rows[:1], logits[:1])
    assert logits[0].argmax() == 9


@pytest.mark.parametrize("place", ["no_such_module_x:A", "json:no_such_class", "json:dumps"])
def test_a_processor_that_cannot_be_loaded_is_named(place: str) -> None:
    with pytest.raises(ValueError, match="'mine'"):
        load_processors({"mine": place})
