"""The example programs on a real model: they end, their choices are among those given, and nothing shared is computed twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench_frontend import PROGRAMS, Call, distinct_tokens, example, figures, plain, through_the_language
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
@pytest.mark.parametrize("name", ["self_consistency"])  # others share less than what the scheduler waits a step for
def test_what_is_shared_is_computed_once(smollm2: Server, name: str) -> None:
    endpoint = RuntimeEndpoint(smollm2.url)
    assert endpoint.flush_cache()
    seconds, calls = through_the_language(smollm2.url, name)
    found = figures(seconds, calls)
    assert found["computed_tokens"] <= found["distinct_tokens"] * 1.02
    assert found["cached_tokens"] > found["computed_tokens"]
    endpoint.shutdown()


def call(prompt: list[int], output: list[int], **body: object) -> Call:
    whole = {"text": "x", "sampling_params": {"max_new_tokens": len(output)}, **body}
    return Call(whole, 0.0, 1.0, [{"prompt_token_ids": prompt, "output_ids": output, "meta_info": {}}])


def test_distinct_tokens_are_those_of_a_tree() -> None:
    assert distinct_tokens([call([1, 2, 3], [4, 5]), call([1, 2, 3, 4, 5, 6], [7])]) == 4
    assert distinct_tokens([call([1, 2, 3], [4]), call([1, 9, 3], [4]), call([1, 2, 3], [8])]) == 3 + 2 + 1


def test_plain_calls_have_no_requests_for_the_cache_and_one_per_choice() -> None:
    scores = call([1], [], text=["xa", "xb"], return_logprob=True)
    asked, warmed = call([1], [5]), call([1], [])
    assert [len(bodies) for _, bodies in plain([warmed, asked, scores])] == [1, 2]
    assert [body["text"] for body in plain([scores])[0][1]] == ["xa", "xb"]
