"""SmolLM2, whose 9 query and 3 KV heads do not divide evenly: the greedy ids of every shape are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from banyan import Engine

pytestmark = pytest.mark.model

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time there was a king who", "1, 2, 3, 5, 8,"]
LONG = {"tp 3": {"tp_size": 3}, "pp 2": {"pp_size": 2}, "tp 2 pp 2": {"tp_size": 2, "pp_size": 2}, "dp 2": {"dp_size": 2}}
LONG["dp 2 tp 2"] = {"dp_size": 2, "tp_size": 2}


def ids(num_tokens: int, **shape: Any) -> list[list[int]]:
    options = {"dtype": "float32", "max_total_tokens": 1024, "context_length": 256, "chunked_prefill_size": 32, **shape}
    with Engine(model_path="smollm2", check_decisions=bool(shape), **options) as engine:
        answers = engine.generate(PROMPTS, {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True})
    return [answer["output_ids"] for answer in answers]


def test_two_ranks_say_what_one_says() -> None:
    assert ids(10, tp_size=2) == ids(10)


@pytest.mark.nightly
def test_every_shape_says_what_one_rank_says() -> None:
    expected = ids(48)
    for name, shape in LONG.items():
        assert ids(48, **shape) == expected, name
