"""SmolLM2 in float32 against transformers: log-probabilities over chunks, pages and cache hits; penalties and bans as defined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness import Harness
from reference import load_reference

from banyan.managers.io_struct import LogprobParams
from banyan.managers.logprobs.logprob_json import TokenLogprob, input_logprobs, output_logprobs
from banyan.model_executor.factory import create_runner
from banyan.model_executor.step import Runner, RunnerConfig
from banyan.srt.model_source import resolve_model

pytestmark = pytest.mark.model

NUM_PROMPTS, NEW_TOKENS, TOP = 20, 6, 3  # prompts: 3 of them in CI
SHARED = [504, 3575, 282, 4649, 314, 7042, 30, 198]


@pytest.fixture(scope="module")
def path() -> str:
    return resolve_model("smollm2").path


@pytest.fixture(scope="module")
def model(path: str) -> transformers.PreTrainedModel:
    return load_reference(path)


@pytest.fixture(scope="module", params=[1, 16])
def paged(request: pytest.FixtureRequest, path: str) -> Iterator[tuple[Runner, int]]:
    runner = create_runner(
        RunnerConfig(model_path=path, dtype="float32", page_size=request.param, max_total_tokens=4096, overlap=True)
    )
    yield runner, request.param
    runner.close()


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    shared = SHARED * 8
    return [shared[: int(rng.integers(1, 65))] + rng.integers(100, 40000, int(rng.integers(1, 60))).tolist() for _ in range(count)]


@torch.inference_mode()
def logits_of(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary]"""
    return model(torch.tensor([ids])).logits[0].float()


def compare(tokens: list[TokenLogprob], truth: torch.Tensor, first: int) -> None:
    """truth [i] is the distribution of the token at position i + 1."""
    for position, token in enumerate(tokens, start=first):
        if position == 0:
            assert token.value is None
            continue
        logprobs = truth[position - 1]
        assert token.value == pytest.approx(float(logprobs[token.token_id]), abs=1e-3)
        best = logprobs.topk(TOP).values
        assert [value for value, _ in token.top or []] == pytest.approx(best.tolist(), abs=1e-3)
        assert [float(logprobs[id]) for _, id in token.top or []] == pytest.approx(best.tolist(), abs=1e-3)


def check_logprobs(runner: Runner, model: transformers.PreTrainedModel, *, page_size: int, chunk: int, count: int) -> None:
    """Prompts share prefixes of random lengths and start at random points, so that hits are cut at random points.

    What was told while generating is told again of the same ids as a prompt: once over KV of prefill, once over KV of decoding.
    """
    harness = Harness("", overlap=True, page_size=page_size, runner=runner, total=4096, chunked_prefill_size=chunk)
    rng = np.random.default_rng(page_size + chunk)
    asked = {f"r{i}": (prompt, int(rng.integers(0, len(prompt)))) for i, prompt in enumerate(prompts(count))}
    for index, (rid, (prompt, start)) in enumerate(asked.items()):
        params = LogprobParams(start_len=start, top_num=TOP)
        harness.submit(rid, prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=params)
        harness.drain() if index % 3 == 0 else harness.turn(2)
    harness.drain()
    assert any(harness.cached.values())
    for rid, (prompt, start) in asked.items():
        params = LogprobParams(start_len=start, top_num=TOP)
        whole = prompt + harness.ids[rid]
        truth = logits_of(model, whole).log_softmax(-1)
        compare(input_logprobs(params, harness.logprobs[rid], prompt), truth, start)
        generated = output_logprobs(params, harness.logprobs[rid], harness.ids[rid])
        assert len(generated) == NEW_TOKENS
        compare(generated, truth, len(prompt))
        for skipped in (0, NEW_TOKENS // 2):
            again = f"{rid}/again{skipped}"
            params = LogprobParams(start_len=len(prompt) + skipped, top_num=TOP)
            harness.submit(again, whole, max_new_tokens=0, logprobs=params)
            harness.drain()
            values = [token.value for token in input_logprobs(params, harness.logprobs[again], whole)]
            assert values == pytest.approx([token.value for token in generated[skipped:]], abs=1e-4)
            if page_size == 1:
                assert harness.cached[again] == len(prompt) + skipped - 1, "all before the first value comes from the cache"


def test_logprobs(paged: tuple[Runner, int], model: transformers.PreTrainedModel) -> None:
    runner, page_size = paged
    check_logprobs(runner, model, page_size=page_size, chunk=24 if page_size == 1 else -1, count=3)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", [16, 48, 112, -1])
def test_logprobs_of_twenty_prompts(paged: tuple[Runner, int], model: transformers.PreTrainedModel, chunk: int) -> None:
    runner, page_size = paged
    check_logprobs(runner, model, page_size=page_size, chunk=chunk, count=NUM_PROMPTS)


CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "logit_bias": {"30": 4.0, "28": -100.0}},
    {"bad_word_ids": [[30], [260, 3575]], "frequency_penalty": 0.3},
]


def edited(logits: np.ndarray, prompt: list[int], output: list[int], own: dict[str, Any]) -> np.ndarray:
    """By definition, token by token."""
    logits = logits.astype(np.float64)
    for token in {*prompt, *output}:
        penalty = own.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= own.get("frequency_penalty", 0.0) * output.count(token) + own.get("presence_penalty", 0.0)
    for key, value in own.get("logit_bias", {}).items():
        logits[int(key)] += value
    for word in own.get("bad_word_ids", []):
        if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]:
            logits[word[-1]] = -np.inf
    return logits


def test_controls(paged: tuple[Runner, int], model: transformers.PreTrainedModel) -> None:
    """SA-08: greedy, all together, with retractions and cache hits: each token is a best one of the edited logits."""
    runner, page_size = paged
    harness = Harness("", overlap=True, page_size=page_size, runner=runner, total=4096, faults={"retract_every": 6})
    prompt = [*SHARED, 260, 3575]
    for index, own in enumerate(CONTROLS):
        harness.submit(f"r{index}", prompt, max_new_tokens=14, ignore_eos=True, **own)
        harness.turn(3)
    harness.drain()
    assert harness.scheduler.stats.num_retracted > 0
    for index, own in enumerate(CONTROLS):
        output = harness.ids[f"r{index}"]
        logits = logits_of(model, prompt + output)
        for step, token in enumerate(output):
            found = edited(logits[len(prompt) + step - 1].numpy(), prompt, output[:step], own)
            assert found[token] >= found.max() - 2e-3, (index, step)
