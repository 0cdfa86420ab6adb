"""The example programs on a real model: they end, their choices are among those given, and nothing shared is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bench_frontend import (
    PROGRAMS,
    Call,
    example,
    figures,
    forward_tokens,
    longest_chain,
    needed_tokens,
    plain,
    through_the_language,
    tree_tokens,
)
from server import Server, running

from banyan.lang.backend.runtime_endpoint import RuntimeEndpoint

CHOICES = {
    "essay_judge": {"grade": "ABCD"},
    "few_shot_classification": {"label": (" positive", " negative")},
    "react": {"tool_1": ("calculate", "finish")},
}
WRITTEN = {
    "multi_turn_chat": ["answer_0", "answer_3"],
    "tip_suggestion": ["summary"],
    "self_consistency": ["answer"],
    "tree_of_thought": ["answer"],
    "react": ["thought_1", "answer"],
}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("smollm2", tmp_path_factory.mktemp("s"), load_format="auto") as server:
        yield server


@pytest.mark.model
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(smollm2: Server, name: str) -> None:
    module, backend = example(name), RuntimeEndpoint(smollm2.url)
    for state in module.PROGRAM.run_batch(module.ITEMS[:2], backend=backend, temperature=0):
        assert state.error() is None
        for variable, choices in CHOICES.get(name, {}).items():
            assert state[variable] in choices
        for variable in WRITTEN.get(name, []):
            assert isinstance(state[variable], str)
    backend.shutdown()


@pytest.mark.model
@pytest.mark.parametrize("name", ["self_consistency", "few_shot_classification", "react"])
def test_what_is_shared_is_computed_once(smollm2: Server, name: str) -> None:
    endpoint = RuntimeEndpoint(smollm2.url)
    assert endpoint.flush_cache()
    seconds, calls = through_the_language(smollm2.url, name)
    found = figures(seconds, calls)
    assert found["computed_tokens"] <= found["needed_tokens"] * 1.02
    assert found["forward_tokens"] <= found["tree_tokens"] * 1.02
    assert found["cached_tokens"] > found["computed_tokens"]
    endpoint.shutdown()


def call(prompt: list[int], output: list[int], num_scored: int = 0, *, num_cached: int = 0, **body: object) -> Call:
    whole = {"text": "x", "sampling_params": {"max_new_tokens": len(output)}, **body}
    return Call(whole, 0.0, 1.0, [answer(prompt, output, num_scored, num_cached)])


def answer(prompt: list[int], output: list[int], num_scored: int, num_cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": len(prompt), "cached_tokens": num_cached, "completion_tokens": len(output)}
    return {
        "prompt_token_ids": prompt,
        "output_ids": output,
        "meta_info": {"input_token_logprobs": [None] * num_scored, **counts},
    }


def choices(*prompts: list[int], num_scored: int) -> Call:
    body = {"text": "x", "continuations": [], "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    return Call(body, 0.0, 1.0, [answer(prompt, [], num_scored) for prompt in prompts])


CHAT = [call([1, 2, 3], [4, 5]), call([1, 2, 3, 4, 5, 6], [7], num_cached=4)]  # 5 was sampled and has to be computed
FORKS = [call([1, 2, 3], [4, 9]), call([1, 2, 3], [8, 9, 9], num_cached=2), call([1, 7], [4], num_cached=1)]
SCORES = [call([1, 2], [9]), choices([1, 2, 3], [1, 2, 4], num_scored=1)]
SCORES[1].answers[0]["meta_info"]["cached_tokens"] = 2  # its last token is not computed, and 2 was there
SCORES[1].answers[1]["meta_info"]["cached_tokens"] = 3


def test_the_tree_has_each_place_of_prompts_once_and_all_outputs() -> None:
    assert tree_tokens(CHAT) == 3 + 2 + 1 + 1, "a prompt that goes on from an output adds what is new"
    assert tree_tokens(FORKS) == (3 + 2) + 3 + (1 + 1), "the same token in another place counts again"
    assert tree_tokens(SCORES) == 2 + 1 + 2
    assert tree_tokens([call([1, 2], [3, 4]), call([1, 2], [3, 4])]) == 2 + 2 + 2, "two samples are two branches"
    assert tree_tokens([call([1, 2], []), call([1, 2], [])]) == 2


def test_forward_tokens_are_inputs_of_a_pass() -> None:
    assert forward_tokens(CHAT) == 3 + 1 + 2 + 0 == 6, "the first output token comes from the prompt's pass, the last is no input"
    assert forward_tokens(FORKS) == 3 + 1 + 1 + 2 + 1 + 0
    assert forward_tokens(SCORES) == 2 + 0 + 1 + 0
    assert forward_tokens([call([1, 2, 3], [])]) == 3, "a request without output has no last token to leave out"
    found = figures(1.0, CHAT)
    assert (found["tree_tokens"], found["forward_tokens"], found["computed_tokens"]) == (7, 6, 5)


def test_needed_tokens_are_those_whose_computation_nobody_can_save() -> None:
    assert needed_tokens([call([1, 2, 3], [4, 5]), call([1, 2, 3, 4, 5, 6], [7])]) == 3 + 2, "5 was sampled, not computed"
    assert needed_tokens([call([1, 2, 3], [4]), call([1, 9, 3], [4]), call([1, 2, 3], [8])]) == 3 + 2 + 1
    assert needed_tokens([choices([1, 2, 3], [1, 2, 4], num_scored=1)]) == 2
    assert needed_tokens([call([1, 2], [9]), choices([1, 2, 3], [1, 2, 4], num_scored=1)]) == 2 + 1
    assert needed_tokens([call([1, 2], [9]), choices([1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 4, 5], num_scored=2)]) == 2 + 1 + 2
    alone = call([1, 2, 3, 5], [], num_scored=2, return_logprob=True)
    assert needed_tokens([alone, alone]) == 3 + 2, "the logits of two places are asked for again"


def test_plain_calls_have_no_requests_for_the_cache_and_one_per_choice() -> None:
    scores = call([1], [], text=["xa", "xb"], return_logprob=True, logprob_start_len=0)
    asked, warmed = call([1], [5]), call([1], [])
    at_once = choices([1, 2, 3], [1, 2, 4], num_scored=1)
    at_once.body["continuations"] = ["a", "b"]
    assert [len(bodies) for _, bodies in plain([warmed, asked, scores, at_once])] == [1, 2, 2]
    assert [body["text"] for body in plain([scores])[0][1]] == ["xa", "xb"]
    assert [(body["text"], body["logprob_start_len"]) for body in plain([at_once])[0][1]] == [("xa", 2), ("xb", 2)]
    assert all("continuations" not in body for body in plain([at_once])[0][1])


def test_the_longest_chain_is_made_of_calls_that_wait_for_each_other() -> None:
    def at(start: float, end: float, num_choices: int = 0) -> Call:
        made = choices(*[[1, 2]] * num_choices, num_scored=1) if num_choices else call([1], [2])
        made.start, made.end = start, end
        made.body |= {"continuations": ["a"] * num_choices} if num_choices else {}
        return made

    program = [at(0, 2), at(0, 3), at(2, 4), at(3.5, 5, num_choices=2)]
    alone = [at(10, 15), at(15, 16), at(16, 18), at(18, 19), at(19, 22)]  # 5, 1, 2 and the choices 1 and 3
    assert longest_chain(program, alone) == 5 + 3
    alone[1] = at(15, 25)
    assert longest_chain(program, alone) == 10 + 3
