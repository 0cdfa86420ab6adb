"""Continuations that are only scored: which prompts are computed, what they tell, and that each item gets its own values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from harness import Harness, prompt_of

from banyan.managers import score_tree
from banyan.managers.io_struct import LogprobColumns, LogprobParams
from banyan.managers.score_tree import Carrier, ScoreTree
from banyan.model_executor.oracle import fake_logprob


def tree_of(items: list[list[int]], start: int) -> ScoreTree:
    tree = ScoreTree.of([np.array(item) for item in items], start)
    assert tree is not None
    return tree


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([[5], [6], [7]], [(0, 0, [5, 6, 7])]),  # choices of one token cost nothing but the prompt's end
        ([[5], [5]], [(0, 0, [5])]),
        ([[5, 6], [7]], [(0, 0, [6, 7])]),
        ([[7], [5, 6]], [(1, 0, [7, 6])]),
        ([[5, 6, 7], [5, 6, 8], [5, 9]], [(0, 0, [7, 8, 9])]),
        ([[5, 6], [7, 8]], [(0, 0, [6, 7]), (1, 1, [8])]),  # the second computes what the first does not tell
        ([[5, 6, 7], [5, 8, 9], [4]], [(0, 0, [7, 8, 4]), (1, 2, [9])]),
    ],
)
def test_carriers(own: list[list[int]], expected: list[tuple[int, int, list[int]]]) -> None:
    prompt = [1, 2, 3]
    tree = tree_of([prompt + tokens for tokens in own], 3)
    assert tree.carriers == [Carrier(leader, 3 + depth, named) for leader, depth, named in expected]


def logprob(context: tuple[int, ...], token: int) -> float:
    """Any function of all that comes before."""
    return -float(np.float32(hash((context, token)) % 100_003 / 1000))


def answers(tree: ScoreTree, items: list[list[int]]) -> list[LogprobColumns]:
    """What a model says to the carriers."""
    found = []
    for carrier in tree.carriers:
        prompt = items[carrier.leader][:-1]
        positions = range(carrier.start, len(prompt) + 1)
        values = [logprob(tuple(prompt[:at]), prompt[at] if at < len(prompt) else 0) for at in positions]
        named = [[logprob(tuple(prompt[:at]), token) for token in carrier.named] for at in positions]
        found.append(
            LogprobColumns(values=np.array(values, "<f4").tobytes(), id_values=np.array(named, "<f4").reshape(-1).tobytes())
        )
    return found


def test_every_item_gets_its_values_and_every_position_is_asked_for_once() -> None:
    draw = random.Random(3)
    for _ in range(300):
        prompt = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))]
        items = [prompt + [draw.randint(1, 3) for _ in range(draw.randint(1, 5))] for _ in range(draw.randint(1, 8))]
        start = draw.randint(1, len(prompt))
        tree = tree_of(items, start)
        told = [tree.told(index, columns) for index, columns in enumerate(answers(tree, items))]
        for index, item in enumerate(items):
            partly = [own if number in tree.needs[index] else None for number, own in enumerate(told)]
            values = np.frombuffer(tree.scores(index, partly).values, "<f4").tolist()
            assert values == [logprob(tuple(item[:at]), item[at]) for at in range(start, len(item))]
        inner = {tuple(item[:at]) for item in items for at in range(start, len(item))}
        asked = [
            tuple(items[carrier.leader][:at])
            for carrier in tree.carriers
            for at in range(carrier.start, len(items[carrier.leader]))
        ]
        assert sorted(asked) == sorted(inner)


def test_a_score_that_was_not_told_is_an_error() -> None:
    tree = tree_of([[1, 5, 6], [1, 7, 8]], 1)
    with pytest.raises(ValueError, match="carrier 1 has told nothing"):
        tree.scores(1, [tree.told(0, answers(tree, [[1, 5, 6], [1, 7, 8]])[0]), None])


def test_what_would_tell_too_much_is_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [np.array([1, 2, *range(20)]), *(np.array([1, 2, 30 + i]) for i in range(9))]
    assert ScoreTree.of(items, 2) is not None
    monkeypatch.setattr(score_tree, "MAX_NAMED_VALUES", 100)
    assert ScoreTree.of(items, 2) is None


# --- the scheduler ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [None, {"retract_every": 3}])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_position_after_a_prompt(make: Any, faults: dict[str, float] | None, mixed: bool) -> None:
    """Chunks, cache hits and other requests beside it change nothing; no token is sampled and no slot is lost."""
    harness: Harness = make(chunked_prefill_size=32, faults=faults, enable_mixed_chunk=mixed)
    draw = np.random.default_rng(1)
    harness.submit("other", prompt_of(98, 40), max_new_tokens=60, ignore_eos=True)
    shared = prompt_of(99, 80)
    asked = {}
    for index in range(10):
        prompt = shared[: int(draw.integers(0, 80))] + prompt_of(index, int(draw.integers(1, 40)))
        start = len(prompt) if index % 2 else int(draw.integers(1, len(prompt) + 1))
        asked[f"r{index}"] = prompt, LogprobParams(start_len=start, token_ids=[7, 300, index], after_prompt=True)
        harness.submit(f"r{index}", prompt, max_new_tokens=0, logprobs=asked[f"r{index}"][1])
        harness.turn(int(draw.integers(0, 4)))
    harness.drain()
    for rid, (prompt, params) in asked.items():
        columns = harness.logprobs[rid].input
        assert columns is not None
        named = np.frombuffer(columns.id_values, "<f4").reshape(-1, 3)
        ids = np.array(params.token_ids)
        assert named.tolist() == [fake_logprob(at, ids).tolist() for at in range(params.start_len, len(prompt) + 1)]
        values = np.frombuffer(columns.values, "<f4")[:-1]
        assert values.tolist() == [float(fake_logprob(at, np.array(prompt[at]))) for at in range(params.start_len, len(prompt))]
        assert (harness.ids[rid], harness.reasons[rid].kind, harness.reasons[rid].length) == ([], "length", 0)


def test_a_prompt_that_is_there_is_computed_from_its_last_token_on(make: Any) -> None:
    harness: Harness = make()
    page, prompt = harness.info.page_size, prompt_of(1, 100)
    harness.submit("before", prompt, max_new_tokens=1)
    harness.drain()
    for rid, start, expected in (("end", 100, 99), ("earlier", 60, 59)):
        harness.submit(rid, prompt, max_new_tokens=0, logprobs=LogprobParams(start_len=start, token_ids=[5], after_prompt=True))
        harness.drain()
        assert harness.cached[rid] == expected // page * page
