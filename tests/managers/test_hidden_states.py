"""Embeddings as prompts and hidden states in the scheduler, turn by turn, over the oracle, whose states tell position and id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import VOCAB, Harness, expected, prompt_of

from banyan.managers.io_struct import RowHidden
from banyan.managers.prompt_embeds import embeds_key
from banyan.model_executor.oracle import embedding_id


def embeds(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, 8)).astype(np.float32)


def ids_of(values: np.ndarray) -> list[int]:
    return [embedding_id(row, VOCAB) for row in values]


def submit(harness: Harness, rid: str, values: np.ndarray, **options: Any) -> None:
    harness.submit(rid, [0] * len(values), input_embeds=values.tobytes(), embeds_key=embeds_key(values), **options)


def states(row: RowHidden) -> list[list[float]]:
    found: list[list[float]] = np.frombuffer(row.values, "<f4").reshape(row.num, 2).tolist()
    return found


@pytest.mark.parametrize("faults", [None, {"retract_every": 3}])
@pytest.mark.parametrize("mixed", [False, True])
def test_each_embedding_and_each_state_is_at_its_place(make: Any, faults: dict[str, float] | None, mixed: bool) -> None:
    harness = make(chunked_prefill_size=32, faults=faults, enable_mixed_chunk=mixed)
    rng = np.random.default_rng(0)
    prompts: dict[str, list[int]] = {}
    for i in range(12):
        rid, length = f"r{i}", int(rng.integers(1, 100))
        options = {"return_hidden_states": i % 3 > 0, "stream": bool(i % 2), "max_new_tokens": 20}
        if i % 2:
            values = embeds(i, length)
            prompts[rid] = ids_of(values)
            submit(harness, rid, values, **options)
        else:
            prompts[rid] = prompt_of(i, length)
            harness.submit(rid, prompts[rid], **options)
        harness.turn(int(rng.integers(0, 4)))
    harness.drain()
    assert set(harness.hidden) == {f"r{i}" for i in range(12) if i % 3}
    for rid, prompt in prompts.items():
        assert harness.ids[rid] == expected(prompt, 20)
        if rid in harness.hidden:
            whole = prompt + harness.ids[rid]
            row, num_cached = harness.hidden[rid], harness.cached[rid]
            assert row.first == num_cached
            assert states(row) == [[float(at), float(whole[at])] for at in range(num_cached, len(whole) - 1)]


def test_only_the_same_embeddings_share_kv(make: Any) -> None:
    harness = make()
    page = harness.info.page_size
    first, second = embeds(1, 65), embeds(2, 65)
    second[:64] = first[:64]
    submit(harness, "a", first)
    harness.drain()
    submit(harness, "again", first, return_hidden_states=True)
    submit(harness, "other", second)
    harness.submit("zeros", [0] * 65)
    harness.drain()
    assert [harness.cached[rid] for rid in ("a", "again", "other", "zeros")] == [0, 64 // page * page, 0, 0]
    assert harness.ids["again"] == harness.ids["a"] == expected(ids_of(first), 8)
    assert harness.ids["other"] == expected(ids_of(second), 8)
    assert harness.ids["zeros"] == expected([0] * 65, 8)
    assert harness.hidden["again"].first == 64 // page * page, "of what the cache has nothing is told"


def test_what_was_told_is_not_told_again_after_a_retraction(make: Any) -> None:
    """Nor left out, when another request put the same tokens into the cache meanwhile."""
    harness = make(chunked_prefill_size=32)
    prompt = prompt_of(7, 50)
    harness.submit("a", prompt, max_new_tokens=40, ignore_eos=True, return_hidden_states=True)
    harness.turn(8)
    harness.scheduler.gate.paused = True
    harness.turn(3)
    harness.scheduler.retract_all()
    (req,) = list(harness.scheduler.waiting)
    assert req.hidden is not None and req.hidden.taken is not None
    assert len(req.matchable) <= req.hidden.taken
    harness.scheduler.gate.paused = False
    harness.drain()
    whole = prompt + harness.ids["a"]
    assert [int(id) for _, id in states(harness.hidden["a"])] == whole[:-1]


@pytest.mark.parametrize("faults", [None, {"retract_every": 3}])
def test_the_newest_state_alone(make: Any, faults: dict[str, float] | None) -> None:
    """Whatever the chunks, the cache and retractions were; steps are asked for one state of a row at most."""
    harness = make(chunked_prefill_size=32, faults=faults)
    prompts = {f"r{i}": prompt_of(i % 5, 9 + 13 * i) for i in range(8)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        harness.submit(rid, prompt, max_new_tokens=1 + 3 * i, stream=bool(i % 2), return_hidden_states="last")
        harness.turn(i % 3)
    harness.drain()
    for rid, prompt in prompts.items():
        row, whole = harness.hidden[rid], prompt + harness.ids[rid]
        assert row.newest and row.first == len(whole) - 2
        assert states(row) == [[float(len(whole) - 2), float(whole[-2])]]


def test_no_output_and_one_token(make: Any) -> None:
    harness = make()
    harness.submit("none", prompt_of(3, 9), max_new_tokens=0, return_hidden_states=True)
    harness.submit("one", [7], max_new_tokens=1, return_hidden_states=True)
    harness.drain()
    assert [len(states(harness.hidden[rid])) for rid in ("none", "one")] == [9, 1]
