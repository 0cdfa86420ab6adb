"""What one rank can do, two tensor-parallel ranks do alike: prompts, their log-probabilities, grammars, sessions, new weights;
with every kind of weights and attention on a CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_tokenizers import byte_level_folder

from banyan import Engine

pytestmark = pytest.mark.nightly

PROMPTS = [list(range(5, 40)), list(range(100, 120))]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
# The scales of int8 weights are those of the channel's part that a rank holds, so the other kinds alone are the same to rounding.
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 2e-5),
    "torch attention": ({"attention_backend": "torch_native"}, 2e-5),
    "bfloat16": ({"dtype": "bfloat16"}, 2e-5),
    "int4": ({"quantization": "int4"}, 2e-5),
    "int8": ({"quantization": "int8"}, 0.05),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints of one shape."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=512, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, **sizes)
    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"model{seed}")
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        byte_level_folder(folder)
        folders.append(str(folder))
    return folders


def everything(models: list[str], **options: Any) -> tuple[dict[str, Any], list[float]]:
    """(what must be equal, log-probabilities)."""
    with Engine(model_path=models[0], **{"dtype": "float32", "max_total_tokens": 1024, **options}) as engine:
        answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0)
        metas = [answer["meta_info"] for answer in answers]
        entries = [entry for meta in metas for entry in [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]]
        grammar = {"max_new_tokens": 30, "temperature": 0, "regex": "[a-c]{5,9}"}
        session = engine.open_session(100)
        first = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, session_params={"id": session})
        place = {"id": session, "rid": first["meta_info"]["id"]}
        second = engine.generate(input_ids=[7, 8, 9], sampling_params=GREEDY, session_params=place)
        same = {
            "ids": [answer["output_ids"] for answer in answers],
            "grammar": engine.generate(input_ids=PROMPTS[1], sampling_params=grammar)["text"],
            "session": [(turn["output_ids"], turn["meta_info"]["cached_tokens"]) for turn in (first, second)],
        }
        success, _ = engine.update_weights_from_disk(models[1])
        assert success
        renewed = engine.generate(input_ids=PROMPTS, sampling_params={**GREEDY, "max_new_tokens": 1}, return_logprob=True)
        entries += [entry for answer in renewed for entry in answer["meta_info"]["output_token_logprobs"]]
    return same, [entry[0] for entry in entries]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_do_what_one_does(models: list[str], kind: str) -> None:
    options, tolerance = KINDS[kind]
    same, logprobs = everything(models, **options)
    same_of_two, logprobs_of_two = everything(models, **options, tp_size=2, check_decisions=True)
    assert same_of_two == same
    assert same["session"][1][1] > len(PROMPTS[0]), "a turn finds the one before in the cache"
    np.testing.assert_allclose(logprobs_of_two, logprobs, atol=tolerance)


SHAPES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "no overlap, pages of 16, chunks": {"disable_overlap_schedule": True, "page_size": 16, "chunked_prefill_size": 16},
    "tp 2": {"tp_size": 2, "check_decisions": True},
    "pp 2, chunks": {"pp_size": 2, "check_decisions": True, "chunked_prefill_size": 16},
    "dp 2": {"dp_size": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_continuations_are_those_of_whole_texts(models: list[str], shape: str) -> None:
    """Scored together without their last tokens, on an empty cache and on a full one, while others decode."""
    prompt, own = PROMPTS[0], [[50], [51, 52], [51, 53], [51, 52, 54, 55], [56, 57]]
    asked: dict[str, Any] = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True}

    def scores(answers: Any) -> list[float]:
        return [entry[0] for answer in answers for entry in answer["meta_info"]["input_token_logprobs"]]

    with Engine(model_path=models[0], dtype="float32", max_total_tokens=1024, **SHAPES[shape]) as engine:
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(engine.generate, input_ids=PROMPTS, sampling_params={**GREEDY, "max_new_tokens": 60})
            found = [scores(engine.generate(input_ids=prompt, continuations=own, **asked)) for _ in range(3)]
            beside.result()
        wholes = [[*prompt, *tokens] for tokens in own]
        expected = scores(engine.generate(input_ids=wholes, logprob_start_len=len(prompt), **asked))
    for each in found:
        np.testing.assert_allclose(each, expected, atol=2e-5)
