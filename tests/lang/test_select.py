"""select over /generate's wire format: what is scored, against an exhaustive computation; and the methods themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from scripted import NativeServer, WordModel

import banyan as bn
from banyan.lang.backend.runtime_endpoint import RuntimeEndpoint
from banyan.lang.choices import ChoicesDecision, ChoicesSamplingMethod, decide, departure
from banyan.lang.transcript import Prompt

METHODS = [bn.token_length_normalized, bn.greedy_token_selection, bn.unconditional_likelihood_normalized]


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def make(*args: Any, **options: Any) -> tuple[NativeServer, RuntimeEndpoint]:
        servers.append(NativeServer(*args, **options))
        return servers[-1], RuntimeEndpoint(servers[-1].url)

    yield make
    for server in servers:
        server.close()


def prompt_of(text: str) -> Prompt:
    return Prompt(text, [], None, ())


def exhaustive(model: WordModel, text: str, choices: list[str]) -> list[list[float]]:
    """log p of each choice's tokens, from the first position at which any prompt + choice departs from the prompt."""
    wholes = [model.encode(text + choice) for choice in choices]
    prompt = model.encode(text)
    at = 0
    while at < len(prompt) and all(at < len(whole) - 1 and whole[at] == prompt[at] for whole in wholes):
        at += 1
    return [[model.logprob(whole, i) for i in range(at, len(whole))] for whole in wholes]


def best(method: Any, model: WordModel, text: str, choices: list[str]) -> str:
    scores = exhaustive(model, text, choices)
    if method is bn.token_length_normalized:
        return choices[max(range(len(choices)), key=lambda i: sum(scores[i]) / len(scores[i]))]
    if method is bn.greedy_token_selection:
        left, length = set(range(len(choices))), max(map(len, scores))
        padded = [row + [sum(row) / len(row)] * (length - len(row)) for row in scores]
        for position in range(length):
            top = max(padded[i][position] for i in left)
            left = {i for i in left if padded[i][position] == top}
        return choices[min(left)]
    gains = []
    for choice, row in zip(choices, scores, strict=True):
        ids = model.encode(text + choice)[-len(row) :]
        plain = [0.0] + [model.logprob(ids, i) for i in range(1, len(ids))]
        gains.append(sum(a - b for a, b in zip(row, plain, strict=True)) / len(row))
    return choices[max(range(len(choices)), key=lambda i: gains[i])]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("bos", [1, None])
def test_select_equals_an_exhaustive_computation(serve: Any, method: Any, ids: bool, bos: int | None) -> None:
    """DS-04, LP-10: 40 random cases, among them words that begin in the prompt and end in a choice, over one token or more."""
    draw = random.Random(f"{ids} {bos}")
    model = WordModel(["the", "ab", "ba", "aba", "ab ab", " a", "b a", "bab", "the ab"], bos=bos)
    _, backend = serve(model, ids=ids)
    for _ in range(40):
        text = "".join(draw.choice("ab ") for _ in range(draw.randint(3, 12))).join(("the ", "the"[: draw.randint(0, 3)]))
        choices = sorted({"".join(draw.choice("ab e") for _ in range(draw.randint(1, 6))) for _ in range(4)})
        decision = backend.select(prompt_of(text), choices, method)
        scores = exhaustive(model, text, choices)
        assert [[entry[0] for entry in row] for row in decision.meta_info["input_token_logprobs"]] == scores
        assert decision.meta_info["normalized_prompt_logprobs"] == [sum(row) / len(row) for row in scores]
        assert decision.decision == best(method, model, text, choices)


def test_the_calls_are_those_of_sglang(serve: Any) -> None:
    server, backend = serve(WordModel())
    backend.select(prompt_of("abcdef"), ["x", "yz"], bn.token_length_normalized)
    first, second = server.seen
    assert (first["text"], first["sampling_params"]["max_new_tokens"]) == ("abcdef", 0)
    assert second["text"] == ["abcdefx", "abcdefyz"]
    assert (second["return_logprob"], second["return_text_in_logprobs"], second["logprob_start_len"]) == (True, True, 7 - 2)
    backend.select(prompt_of("abcdef"), ["x", "yz"], bn.unconditional_likelihood_normalized)
    assert server.seen[-1]["input_ids"] == [[ord("x")], [ord("y"), ord("z")]]
    assert server.seen[-1]["logprob_start_len"] == 0


def test_one_healed_token_needs_no_further_request_and_more_need_one(serve: Any) -> None:
    model = WordModel([" P", " Paris", "is Paris"])
    server, backend = serve(model)
    decision = backend.select(prompt_of("answer "), ["Paris", "Rome"], bn.token_length_normalized)
    assert [len(row) for row in decision.meta_info["input_token_logprobs"]] == [1, 5]  # " Paris"; " ", "R", "o", "m", "e"
    assert len(server.seen) == 2
    server.seen.clear()
    decision = backend.select(prompt_of("it is "), ["Paris", "Rome"], bn.token_length_normalized)
    assert [row[0][1] for row in decision.meta_info["input_token_logprobs"]] == [model.id_of("is Paris"), ord("i")]
    assert [body.get("logprob_start_len") for body in server.seen] == [None, 5, 0]


def test_without_ids_the_prompt_is_scored_with_the_choices(serve: Any) -> None:
    server, backend = serve(WordModel(), ids=False)
    backend.select(prompt_of("abc"), ["x", "y"], bn.token_length_normalized)
    assert server.seen[1]["text"] == ["abcx", "abcy", "abc"]


def test_a_short_prompt(serve: Any) -> None:
    """SGLang's client subtracts None here."""
    model = WordModel(["ax"], bos=None)
    _, backend = serve(model)
    assert backend.select(prompt_of("a"), ["b", "c"], bn.greedy_token_selection).decision == best(
        bn.greedy_token_selection, model, "a", ["b", "c"]
    )
    with pytest.raises(bn.BackendError, match="change the first token"):
        backend.select(prompt_of("a"), ["x", "c"], bn.token_length_normalized)
    with pytest.raises(bn.BackendError, match="needs text before it"):
        backend.select(prompt_of(""), ["x", "c"], bn.token_length_normalized)


def test_a_missing_log_probability_is_an_error_and_no_number(serve: Any) -> None:
    server, backend = serve(WordModel())
    server.model.logprob = lambda ids, position: None  # type: ignore[assignment, return-value]
    with pytest.raises(bn.BackendError, match="gave no log-probability"):
        backend.select(prompt_of("abc"), ["x", "y"], bn.token_length_normalized)


def test_select_in_a_program(serve: Any) -> None:
    server, backend = serve(WordModel([" yes", " no"]))

    @bn.function
    def program(s: Any) -> None:
        s += "Is it so?" + bn.select("x", [" yes", " no"], choices_method=bn.greedy_token_selection)

    state = program.run(backend=backend)
    assert state["x"] == best(bn.greedy_token_selection, server.model, "Is it so?", [" yes", " no"])
    assert state.text() == "Is it so?" + state["x"]
    assert len(state.get_meta_info("x")["greedy_logprob_matrix"]) == 2
    (event,) = [event for event in state.show().json["events"] if event["kind"] == "select"]
    assert event["prompt_tokens"] == 10 + 11 + 11


# --- the methods ------------------------------------------------------------------------------------------------------------------


def rows(*values: list[float]) -> list[list[Any]]:
    return [[[value, 100 * rank + index, None] for index, value in enumerate(row)] for rank, row in enumerate(values)]


@pytest.mark.parametrize(
    ("method", "scored", "plain", "expected"),
    [
        (bn.token_length_normalized, rows([-1, -3], [-1.5]), None, "b"),
        (bn.token_length_normalized, rows([-1], [-1.0]), None, "a"),
        (bn.token_length_normalized, rows([0.0], [-0.1]), None, "a"),
        (bn.greedy_token_selection, rows([-1, -9], [-2, 0]), None, "a"),
        (bn.greedy_token_selection, rows([-1, -5], [-1, -3]), None, "b"),
        (bn.greedy_token_selection, rows([-1], [-1, -2]), None, "a"),
        (bn.greedy_token_selection, rows([-1], [-1, -0.5]), None, "b"),
        (bn.unconditional_likelihood_normalized, rows([-1], [-2]), rows([0], [0]), "a"),
        (
            bn.unconditional_likelihood_normalized,
            rows([-2, -2], [-2, -1]),
            [[[None, 0]] + rows([-4])[0], [[None, 0]] + rows([-1])[0]],
            "a",
        ),
    ],
)
def test_methods(method: ChoicesSamplingMethod, scored: Any, plain: Any, expected: str) -> None:
    assert decide(method, ["a", "b"], scored, unconditional=plain).decision == expected


def test_rounding_does_not_part_choices_that_begin_alike() -> None:
    """The first token is the same; its values differ as rows of a batch may."""
    scored = [[[-1.000001, 5, None], [-9.0, 6, None]], [[-1.000002, 5, None], [-2.0, 7, None]]]
    assert decide(bn.greedy_token_selection, ["a", "b"], scored).decision == "b"
    texts = [[[-1.000001, None, "x"], [-9.0, None, "y"]], [[-1.000002, None, "x"], [-2.0, None, "z"]]]
    assert decide(bn.greedy_token_selection, ["a", "b"], texts).decision == "b"


def test_a_method_of_one_s_own(serve: Any) -> None:
    class Longest(ChoicesSamplingMethod):
        def __call__(self, *, choices: list[str], **_: Any) -> ChoicesDecision:
            return ChoicesDecision(max(choices, key=len), {"why": "length"})

    _, backend = serve(WordModel())
    decision = backend.select(prompt_of("abc"), ["x", "yyy", "z"], Longest())
    assert decision.decision == "yyy"
    assert decision.meta_info["why"] == "length"
    with pytest.raises(ValueError, match="are required"):
        decide(bn.unconditional_likelihood_normalized, ["a"], rows([-1]))


@pytest.mark.parametrize(
    ("prompt", "wholes", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3, 4], [1, 2, 3, 5]], 3),
        ([1, 2, 3], [[1, 2, 9, 4], [1, 2, 3, 5]], 2),
        ([1, 2, 3], [[1, 2], [1, 2, 3, 5]], 1),
        ([1], [[2, 3]], 0),
        ([], [[2, 3]], 0),
    ],
)
def test_departure(prompt: list[int], wholes: list[list[int]], expected: int) -> None:
    assert departure(prompt, wholes) == expected
