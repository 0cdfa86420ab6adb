"""Log-probabilities in the scheduler, turn by turn: over the oracle, whose values tell token and position, and a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import VOCAB, Harness, expected, prompt_of

from banyan.managers.io_struct import LogprobParams
from banyan.managers.logprobs.logprob_json import TokenLogprob, input_logprobs, output_logprobs
from banyan.model_executor.oracle import fake_logprob

NAMED = [7, 300]


def ask(start: int, top_num: int = 2, token_ids: list[int] | None = None) -> LogprobParams:
    return LogprobParams(start_len=start, top_num=top_num, token_ids=NAMED if token_ids is None else token_ids)


def fake(position: int, token: int, params: LogprobParams) -> TokenLogprob:
    """What the oracle says of a token at a position."""
    scores = fake_logprob(position, np.arange(VOCAB))
    best = np.argsort(-scores, kind="stable")[: params.top_num].tolist()
    top = [(float(scores[id]), id) for id in best]
    return TokenLogprob(token, float(scores[token]), top, [(float(scores[id]), id) for id in params.token_ids])


def check(harness: Harness, rid: str, prompt: list[int], params: LogprobParams) -> None:
    output, row = harness.ids[rid], harness.logprobs[rid]
    assert output_logprobs(params, row, output) == [fake(len(prompt) + i, token, params) for i, token in enumerate(output)]
    values = input_logprobs(params, row, prompt)
    if params.start_len == len(prompt):  # one entry without values, where ids are asked for by name
        assert values == ([TokenLogprob(prompt[-1], None, None, None)] if params.token_ids else [])
        return
    assert len(values) == len(prompt) - params.start_len
    if params.start_len == 0:
        assert values.pop(0) == TokenLogprob(prompt[0], None, None, None)
    first = max(params.start_len, 1)
    assert values == [fake(position, prompt[position], params) for position in range(first, len(prompt))]


@pytest.mark.parametrize("faults", [None, {"retract_every": 3}])
@pytest.mark.parametrize("mixed", [False, True])
def test_each_value_belongs_to_its_token(make: Any, faults: dict[str, float] | None, mixed: bool) -> None:
    harness = make(chunked_prefill_size=32, faults=faults, enable_mixed_chunk=mixed)
    rng = np.random.default_rng(0)
    shared = prompt_of(99, 80)
    asked = {}
    for i in range(10):
        prompt = shared[: int(rng.integers(0, 80))] + prompt_of(i, int(rng.integers(1, 60)))
        params = ask(int(rng.integers(0, len(prompt) + 1)), top_num=i % 3, token_ids=NAMED[: i % 3])
        asked[f"r{i}"] = prompt, params
        wanted = params if i != 4 else None
        harness.submit(f"r{i}", prompt, max_new_tokens=20, stream=bool(i % 2), stream_interval=1 + i % 3, logprobs=wanted)
        harness.turn(int(rng.integers(0, 4)))
    harness.drain()
    assert "r4" not in harness.logprobs
    for rid, (prompt, params) in asked.items():
        assert harness.ids[rid] == expected(prompt, 20)
        if rid != "r4":
            check(harness, rid, prompt, params)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_cached_prefix_is_computed_again_as_far_as_needed(make: Any, order: str) -> None:
    """LP-02, LP-04: from one token before the first position."""
    harness = make()
    page = harness.info.page_size
    shared = prompt_of(1, 100)
    prompts = {"a": [*shared, 5], "b": [*shared, 6]}
    for rid in order:
        harness.submit(rid, prompts[rid], logprobs=ask(0))
        harness.drain()
        check(harness, rid, prompts[rid], ask(0))
        assert harness.cached[rid] == 0
    for start in (1, 50, 100, 101):
        rid = f"s{start}"
        harness.submit(rid, prompts["a"], logprobs=ask(start))
        harness.drain()
        check(harness, rid, prompts["a"], ask(start))
        assert harness.cached[rid] == (min(start - 1, 100) if start < 101 else 100) // page * page


def test_turns_of_a_conversation_have_no_gap(make: Any) -> None:
    """LP-04: each turn asks for what is new since the turn before."""
    harness = make()
    tokens: list[int] = []
    for turn in range(4):
        prompt = tokens + prompt_of(turn, 17)
        harness.submit(f"t{turn}", prompt, logprobs=ask(len(tokens)))
        harness.drain()
        check(harness, f"t{turn}", prompt, ask(len(tokens)))
        tokens = prompt + harness.ids[f"t{turn}"]


def test_no_output_and_one_token(make: Any) -> None:
    harness = make(chunked_prefill_size=32)
    for rid, prompt in (("long", prompt_of(3, 90)), ("one", [7])):
        harness.submit(rid, prompt, max_new_tokens=0, logprobs=ask(0))
        harness.drain()
        assert harness.ids[rid] == []
        check(harness, rid, prompt, ask(0))


def test_a_request_that_waits_is_not_held_up_for_a_prefix_that_it_may_not_use(make: Any) -> None:
    harness = make()
    shared = prompt_of(1, 200)
    for index in range(3):
        harness.submit(f"r{index}", [*shared, index + 3], max_new_tokens=2, logprobs=ask(0))
    harness.turn()
    assert len(harness.scheduler.waiting) == 0
    harness.drain()


def test_aborted_amid_its_prompt_it_tells_what_it_has(make: Any) -> None:
    harness = make(chunked_prefill_size=32)
    prompt = prompt_of(5, 200)
    harness.submit("a", prompt, logprobs=ask(0))
    harness.turn(3)
    harness.abort("a")
    harness.drain()
    values = input_logprobs(ask(0), harness.logprobs["a"], prompt)
    assert values[0].value is None
    assert values[1:] == [fake(position, prompt[position], ask(0)) for position in range(1, len(values))]


# --- over a tiny model ----------------------------------------------------------------------------------------------------------


def values(tokens: list[TokenLogprob]) -> np.ndarray:
    return np.array([[token.value, *[value for value, _ in [*(token.top or []), *(token.named or [])]]] for token in tokens])


@pytest.mark.parametrize(("overlap", "page_size"), [(False, 1), (True, 16)])
def test_generated_values_equal_those_of_the_same_ids_as_a_prompt(folder: Path, overlap: bool, page_size: int) -> None:
    harness = Harness(
        folder, overlap=overlap, page_size=page_size, load_format="dummy", chunked_prefill_size=32, faults={"retract_every": 7}
    )
    prompts = {f"r{i}": prompt_of(i, 20 + 9 * i) for i in range(5)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, max_new_tokens=30, temperature=1.0, sampling_seed=3, logprobs=ask(0), ignore_eos=True)
        harness.turn(2)
    harness.drain()
    for rid, prompt in prompts.items():
        whole = prompt + harness.ids[rid]
        generated = values(output_logprobs(ask(0), harness.logprobs[rid], harness.ids[rid]))
        for kind in ("cold", "hit"):
            start = len(prompt) if kind == "hit" else 0
            again = f"{rid}{kind}"
            harness.submit(again, whole, max_new_tokens=1, logprobs=ask(start), cache_salt="x" if kind == "cold" else "")
            harness.drain()
            fed = input_logprobs(ask(start), harness.logprobs[again], whole)
            np.testing.assert_allclose(values(fed[len(prompt) - start :]), generated, atol=1e-4)
            assert (harness.cached[again] > 0) == (kind == "hit")
    harness.close()


def test_values_are_of_the_edited_logits_over_the_temperature(folder: Path) -> None:
    harness = Harness(folder, overlap=True, page_size=1, load_format="dummy")
    prompt = prompt_of(1, 12)

    def first(rid: str, **options: Any) -> TokenLogprob:
        params = ask(12, top_num=20, token_ids=[50, 60])
        harness.submit(rid, prompt, max_new_tokens=1, logprobs=params, **options)
        harness.drain()
        return output_logprobs(params, harness.logprobs[rid], harness.ids[rid])[0]

    plain, hot = first("plain"), first("hot", temperature=0.25, sampling_seed=1)
    (value, _), (other, _) = plain.named or []
    (hot_value, _), (hot_other, _) = hot.named or []
    assert hot_value - hot_other == pytest.approx((value - other) * 4, abs=1e-4)
    biased = first("biased", logit_bias={"50": 5.0})
    (biased_value, _), (biased_other, _) = biased.named or []
    assert biased_value - biased_other == pytest.approx(value - other + 5, abs=1e-4)
    banned = first("banned", allowed_token_ids=[60, 61])
    assert (banned.named or [])[0][0] == -9999.0
    assert [pair[0] for pair in banned.top or []][2:] == [-9999.0] * 18
    young = first("young", min_new_tokens=1, stop_token_ids=[50])
    assert (young.named or [])[0][0] == -9999.0
    assert first("top_k", temperature=1.0, top_k=2, sampling_seed=5).named == plain.named
    harness.close()
