"""Greedy output of the real models equals transformers' in float32, whatever the loop, chunks, pages, cache and pool."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from harness import Harness
from reference import TIE, load_reference, worst_gap

from banyan.managers.tokenizer import Tokenizer
from banyan.model_executor.factory import create_runner
from banyan.model_executor.step import Runner, RunnerConfig
from banyan.srt.model_source import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

STORY = "The river ran past the mill, and the miller's daughter counted the boats that went down to the sea. "
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "<|im_start|>user\nWrite a haiku about autumn.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at a temperature of",
    "SELECT name, age FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "世界 means",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\n# invert a matrix\n",
    "The quick brown fox",
    '{"name": "Ada", "born":',
    "To bake bread you need flour, water, salt and",
    STORY * 6 + "In the end, the daughter",
    STORY * 12 + "One morning, the boats",
    STORY * 30 + "The miller said:",
    "A list of European rivers:\n1. Danube\n2. Rhine\n3.",
]


class Model:
    """A model's file, its tokenizer and the prompts' ids."""

    def __init__(self, alias: str) -> None:
        self.path = resolve_model(alias).path
        self.tokenizer = Tokenizer.load(self.path)
        self.prompts = [list(map(int, self.tokenizer.encode(text))) for text in PROMPTS]

    def runner(self, *, overlap: bool, page_size: int) -> Runner:
        return create_runner(
            RunnerConfig(model_path=self.path, dtype="float32", overlap=overlap, page_size=page_size, max_total_tokens=16384)
        )

    def harness(self, runner: Runner, **options: Any) -> Harness:
        return Harness(self.path, runner=runner, load_format="auto", **options)


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return Model("smollm2")


def generate(harness: Harness, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        harness.submit(f"r{i}", prompt, max_new_tokens=num_new)
    harness.drain()
    return [harness.ids[f"r{i}"] for i in range(len(prompts))]


@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m"])
def test_twenty_prompts_equal_transformers(alias: str) -> None:
    model = Model(alias)
    assert max(map(len, model.prompts)) > 600, "one prompt is longer than Gemma's window"
    runner = model.runner(overlap=True, page_size=1)
    harness = model.harness(runner, overlap=True, page_size=1, max_running_requests=20, total=8192)
    outputs = generate(harness, model.prompts, 64)
    runner.close()
    reference = load_reference(model.path)
    for prompt, output in zip(model.prompts, outputs, strict=True):
        assert len(output) == 64 or output[-1] in harness.info.model.eos_token_ids
        assert worst_gap(reference, prompt, output) <= TIE


@pytest.fixture(scope="module")
def expected(smollm2: Model) -> list[list[int]]:
    """One request at a time, nothing shared, nothing split."""
    runner = smollm2.runner(overlap=False, page_size=1)
    outputs = []
    for prompt in smollm2.prompts[:17]:
        harness = smollm2.harness(runner, overlap=False, page_size=1, disable_radix_cache=True, chunked_prefill_size=-1)
        outputs += generate(harness, [prompt], 24)
    runner.close()
    return outputs


# overlap, page size, chunk, radix off, small pool: the first rows hold every pair of values, the others run at night
IN_CI = [
    (True, 1, -1, False, False),
    (True, 1, 32, True, True),
    (True, 16, 32, False, True),
    (True, 16, -1, True, False),
    (False, 1, 32, False, True),
    (False, 1, -1, True, True),
    (False, 16, -1, False, True),
    (False, 16, 32, True, False),
    (True, 1, 32, False, False),
]
AT_NIGHT = sorted(set(itertools.product([False, True], [1, 16], [-1, 32], [False, True], [False, True])) - set(IN_CI))
MATRIX = [pytest.param(*row, id=str(row)) for row in IN_CI]
MATRIX += [pytest.param(*row, id=str(row), marks=pytest.mark.nightly) for row in AT_NIGHT]


@pytest.mark.parametrize(("overlap", "page_size", "chunk", "radix_off", "small_pool"), MATRIX)
def test_matrix(
    smollm2: Model, expected: list[list[int]], overlap: bool, page_size: int, chunk: int, radix_off: bool, small_pool: bool
) -> None:
    with contextlib.closing(smollm2.runner(overlap=overlap, page_size=page_size)) as runner:
        harness = smollm2.harness(
            runner,
            overlap=overlap,
            page_size=page_size,
            disable_radix_cache=radix_off,
            chunked_prefill_size=chunk,
            max_running_requests=20,
            total=448 if small_pool else 8192,
            schedule_conservativeness=0.1 if small_pool else 1.0,
        )
        assert generate(harness, smollm2.prompts[:17], 24) == expected
    assert (harness.scheduler.stats.num_retracted > 0) == small_pool


def test_the_matrix_in_ci_holds_every_pair_of_values() -> None:
    for i, j in itertools.combinations(range(5), 2):
        assert len({(row[i], row[j]) for row in IN_CI}) == 4
