"""SmolLM2, the real one, against transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from banyan.model_executor.model_runner import ModelRunner
from banyan.model_executor.step import TOP_K_ALL, ForwardMode, RunnerConfig, SamplingInput, StepInput
from banyan.srt.model_source import resolve_model

pytestmark = pytest.mark.model

NEW_TOKENS = 24
TIE = 2e-3  # log-probabilities nearer than this may be ranked either way
PROMPTS = [
    [504, 3575, 282, 4649, 314],
    [1, 4093, 198, 19556, 2, 198, 1, 520, 9531, 198],
    list(range(1000, 1300)),
]


def greedy(n: int) -> SamplingInput:
    zeros = np.zeros(n, np.float32)
    longs = np.zeros(n, np.int64)
    return SamplingInput(zeros, np.ones(n, np.float32), np.full(n, TOP_K_ALL, np.int32), zeros, longs, longs)


def generate(runner: ModelRunner) -> np.ndarray:
    """[requests, NEW_TOKENS]: all prompts in one prefill, then decode steps with placeholders, slots in no order."""
    n, lens = len(PROMPTS), np.array([len(p) for p in PROMPTS], np.int32)
    table = np.zeros((n + 1, 512), np.int32)
    table[1:] = np.random.default_rng(0).permutation(n * 512).reshape(n, 512) + 1
    runner.init_cache(n * 512, table)
    rows, everyone = np.arange(1, n + 1, dtype=np.int32), np.arange(n, dtype=np.int32)
    ids = np.concatenate([np.array(p, np.int64) for p in PROMPTS])
    locs = np.concatenate([table[row, :length] for row, length in zip(rows, lens, strict=True)])
    handles = [runner.launch(StepInput(ForwardMode.EXTEND, rows, lens, lens, ids, locs, everyone, greedy(n)))]
    for step in range(1, NEW_TOKENS):
        now = lens + np.int32(step)
        inputs, ones = -rows.astype(np.int64), np.ones(n, np.int32)
        handles.append(
            runner.launch(StepInput(ForwardMode.DECODE, rows, now, ones, inputs, table[rows, now - 1], everyone, greedy(n)))
        )
    return np.stack([handle.wait().next_ids for handle in handles], axis=1)


def test_greedy_ids_equal_transformers():
    path = resolve_model("smollm2").path
    runner = ModelRunner(RunnerConfig(model_path=path, dtype="float32", max_total_tokens=2048))
    outputs = generate(runner)
    runner.close()
    folder, _, file = path.rpartition("/")
    quantization = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, quantization_config=quantization, dtype=torch.float32
    ).eval()
    for prompt, output in zip(PROMPTS, outputs.tolist(), strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        lost = logprobs.max(-1).values - logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert lost.max() < TIE, (prompt[:5], lost.argmax(), lost.max())
