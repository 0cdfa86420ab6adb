"""Embeddings in and hidden states out, over the real processes and a tiny random model, compared with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness import CONFIG
from tiny_tokenizers import byte_level_folder

from banyan import Engine, RequestError

PROMPT = list(range(100, 140))
PARAMS = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    names = {name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type", "torch_dtype")}
    config = transformers.LlamaConfig(**names, pad_token_id=None, initializer_range=0.5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    byte_level_folder(path)
    return str(path)


@pytest.fixture(scope="module")
def reference(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module", params=[None, "torch_native"])
def engine(request: pytest.FixtureRequest, folder: str) -> Iterator[Engine]:
    options = {"max_total_tokens": 2048, "chunked_prefill_size": 16, "strict": True, "enable_return_hidden_states": True}
    with Engine(model_path=folder, attention_backend=request.param, **options) as engine:
        yield engine


def states_of(reference: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        hidden: np.ndarray = reference.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return hidden


def embeddings(reference: Any, ids: list[int]) -> np.ndarray:
    table: np.ndarray = reference.get_input_embeddings().weight.detach().numpy()
    return table[ids]


def test_hidden_states(engine: Engine, reference: Any) -> None:
    engine.flush_cache()
    answer: Any = engine.generate(input_ids=PROMPT, sampling_params=PARAMS, return_hidden_states=True)
    own = states_of(reference, PROMPT + answer["output_ids"])
    first, *rest = answer["meta_info"]["hidden_states"]
    np.testing.assert_allclose(first, own[:40], atol=1e-4)
    np.testing.assert_allclose(rest, own[40:45], atol=1e-4)
    hit: Any = engine.generate(input_ids=PROMPT, sampling_params={**PARAMS, "n": 2}, return_hidden_states=True)
    for item in hit:
        assert item["output_ids"] == answer["output_ids"]
        assert [len(item["meta_info"]["hidden_states"][0]), len(item["meta_info"]["hidden_states"])] == [1, 6]
        np.testing.assert_allclose(item["meta_info"]["hidden_states"][0], own[39:40], atol=1e-4)
    assert "hidden_states" not in engine.generate(input_ids=PROMPT, sampling_params=PARAMS)["meta_info"]  # type: ignore[call-overload,index]


@pytest.mark.parametrize("incremental", [False, True])
def test_hidden_states_in_a_stream(engine: Engine, reference: Any, incremental: bool) -> None:
    engine.flush_cache()
    named = {"stream": True, "incremental": incremental, "return_hidden_states": True}
    chunks: Any = list(engine.generate(input_ids=PROMPT, sampling_params=PARAMS, **named))
    told = [chunk["meta_info"].get("hidden_states", []) for chunk in chunks]
    whole = [state for states in told for state in states] if incremental else told[-1]
    own = states_of(reference, PROMPT + [id for chunk in (chunks if incremental else chunks[-1:]) for id in chunk["output_ids"]])
    np.testing.assert_allclose(whole[0], own[:40], atol=1e-4)
    np.testing.assert_allclose(whole[1:], own[40:45], atol=1e-4)


@pytest.mark.parametrize("incremental", [False, True])
def test_the_newest_hidden_state_alone(engine: Engine, reference: Any, incremental: bool) -> None:
    named: Any = {"input_ids": PROMPT, "sampling_params": PARAMS, "return_hidden_states": "last"}
    answer: Any = engine.generate(**named)
    own = states_of(reference, PROMPT + answer["output_ids"])
    (state,) = answer["meta_info"]["hidden_states"]
    np.testing.assert_allclose(state, own[-2], atol=1e-4)
    chunks: Any = list(engine.generate(**named, stream=True, incremental=incremental))
    for chunk in chunks:
        (state,) = chunk["meta_info"]["hidden_states"]
        newest = len(PROMPT) + chunk["meta_info"]["completion_tokens"] - 1  # a chunk may carry several tokens
        np.testing.assert_allclose(state, own[newest - 1], atol=1e-4)


def test_embeddings_of_ids_say_what_the_ids_say(engine: Engine, reference: Any) -> None:
    engine.flush_cache()
    named = {"sampling_params": PARAMS, "return_logprob": True, "return_hidden_states": True}
    expected: Any = engine.generate(input_ids=PROMPT, **named)
    values = embeddings(reference, PROMPT)
    cold: Any = engine.generate(input_embeds=values, **named)
    warm: Any = engine.generate(input_embeds=values.tolist(), **named)
    for answer, num_cached in ((cold, 0), (warm, 39)):
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["meta_info"]["cached_tokens"] == num_cached
        assert answer["meta_info"]["prompt_tokens"] == 40
        got, wanted = ([x[0] for x in each["meta_info"]["output_token_logprobs"]] for each in (answer, expected))
        assert got == pytest.approx(wanted, abs=1e-4)
    np.testing.assert_allclose(cold["meta_info"]["hidden_states"][0], expected["meta_info"]["hidden_states"][0], atol=1e-4)


def test_a_batch_of_embeddings(engine: Engine, reference: Any) -> None:
    prompts = [PROMPT[:7], PROMPT[3:30], [5]]
    rng = np.random.default_rng(0)
    given: Any = [torch.tensor(embeddings(reference, prompt)) for prompt in prompts]
    noise = rng.standard_normal((9, 8)).astype(np.float32)
    answers: Any = engine.generate(input_embeds=[*given, noise.tolist()], sampling_params={**PARAMS, "n": 2})
    assert len(answers) == 8
    for index, prompt in enumerate(prompts):
        alone: Any = engine.generate(input_ids=prompt, sampling_params=PARAMS)
        assert [answers[2 * index + sample]["output_ids"] for sample in (0, 1)] == [alone["output_ids"]] * 2
    with torch.inference_mode():
        logits = reference(inputs_embeds=torch.tensor(noise)[None]).logits[0, -1]
    assert answers[6]["output_ids"][0] == int(logits.argmax())


def test_one_embedding_is_no_decode_step(engine: Engine, reference: Any) -> None:
    value = np.random.default_rng(1).standard_normal((1, 8)).astype(np.float32)
    answer: Any = engine.generate(input_embeds=value, sampling_params={**PARAMS, "max_new_tokens": 1})
    with torch.inference_mode():
        logits = reference(inputs_embeds=torch.tensor(value)[None]).logits[0, -1]
    assert answer["output_ids"] == [int(logits.argmax())]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ([], "must be a list"),
        ([[]], "must be a list"),
        ([[1.0] * 7], "have 8 numbers"),
        ([[1.0] * 8, [1.0] * 7], "must be a list"),
        ([["1"] * 8], "must be a list"),
        ([[True] * 8], "must be a list"),
        ([[1 << 70] * 8], "must be a list"),
        ([[1e300] * 8], "finite"),
        ([[float("nan")] * 8], "finite"),
        ([[[1.0] * 8], []], "must be a list"),
        ([[[[1.0]] * 8]], "must be a list"),
        ([[1.0] * 8] * 5000, "longer than"),
    ],
)
def test_what_is_no_prompt_is_refused(engine: Engine, given: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        engine.generate(input_embeds=given, sampling_params=PARAMS)
    assert (caught.value.status_code, caught.value.param) == (400, "input_embeds")


@pytest.mark.parametrize(
    "more",
    [
        {"input_ids": [1]},
        {"return_prompt_token_ids": True},
        {"session_params": {"id": "x"}},
        {"return_logprob": True, "logprob_start_len": 0},
    ],
)
def test_what_needs_ids_is_refused(engine: Engine, more: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        engine.generate(input_embeds=[[1.0] * 8], sampling_params=PARAMS, **more)
