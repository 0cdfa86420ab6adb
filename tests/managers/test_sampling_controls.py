"""Penalties and the like over a tiny model: each request equals its solo run, whatever joins or is retracted beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import EOS, VOCAB, Harness, prompt_of

from banyan.managers.io_struct import FinishReason

OPTIONS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.9},
    {"repetition_penalty": 0.6, "temperature": 0.8, "sampling_seed": 7},
    {"logit_bias": {"123": 100.0}},
    {"logit_bias": {str(VOCAB - 1): 3.0, "0": 3.0}, "frequency_penalty": 2.0, "ignore_eos": True},
    {"allowed_token_ids": [5, 9, 200, VOCAB - 1], "presence_penalty": 2.0},
    {"allowed_token_ids": [5, 9], "bad_word_ids": [[5, 9], [9, 5, 5]]},
    {"min_new_tokens": 10, "logit_bias": {str(EOS): 50.0, "77": 60.0}, "stop_token_ids": [77]},
    {"temperature": 1.0, "sampling_seed": 3, "frequency_penalty": 2.0},
    {"logit_processor": "next", "custom_params": {"step": 3}},
]
PROCESSORS = {"next": "test_sampling_controls_processor:Next"}


class Next:
    """Only the token ``step`` after the newest may come."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.step = params["step"]

    def __call__(self, prompt_ids: torch.Tensor, output_ids: torch.Tensor, logits_V: torch.Tensor) -> torch.Tensor:
        newest = output_ids[-1] if len(output_ids) else prompt_ids[-1]
        changed = torch.full_like(logits_V, float("-inf"))
        changed[(newest + self.step) % VOCAB] = 0
        return changed


@pytest.fixture(scope="module", autouse=True)
def _processor_module() -> Any:
    import sys
    from types import ModuleType

    module = ModuleType("test_sampling_controls_processor")
    module.Next = Next  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield
    del sys.modules[module.__name__]


def submit(harness: Harness, index: int) -> None:
    harness.submit(f"r{index}", prompt_of(index, 10 + 7 * index), max_new_tokens=24, **OPTIONS[index])


@pytest.fixture(scope="module")
def solo(folder: Path) -> dict[str, list[int]]:
    harness = Harness(folder, overlap=False, page_size=1, load_format="dummy", logit_processors=PROCESSORS)
    for index in range(len(OPTIONS)):
        submit(harness, index)
        harness.drain()
    harness.close()
    return harness.ids


@pytest.mark.parametrize(("overlap", "page_size"), [(False, 1), (True, 1), (False, 16), (True, 16)])
@pytest.mark.parametrize("seed", range(3))
def test_each_equals_its_solo_run(folder: Path, solo: dict[str, list[int]], overlap: bool, page_size: int, seed: int) -> None:
    """SA-04: rows join, end and are retracted at different steps."""
    rng = np.random.default_rng(seed)
    faults = {"retract_every": float(rng.integers(3, 9))} if seed else None
    harness = Harness(
        folder,
        overlap=overlap,
        page_size=page_size,
        load_format="dummy",
        faults=faults,
        logit_processors=PROCESSORS,
        max_running_requests=5,
        chunked_prefill_size=32,
        enable_mixed_chunk=seed == 2,
    )
    for index in rng.permutation(len(OPTIONS)).tolist():
        submit(harness, index)
        harness.turn(int(rng.integers(0, 6)))
    harness.drain()
    harness.close()
    assert bool(faults) == (harness.scheduler.stats.num_retracted > 0)
    assert harness.ids == solo


def test_the_solo_runs_are_what_was_asked_for(solo: dict[str, list[int]]) -> None:
    assert solo["r5"] == [123] * 24
    assert len(set(solo["r7"][:4])) == 4
    assert set(solo["r8"]) <= {5, 9}
    pairs = list(zip(solo["r8"], solo["r8"][1:], strict=False))
    assert (5, 9) not in pairs
    assert not {EOS, 77} & set(solo["r9"][:10])
    assert solo["r9"][10:] == [77]
    first = prompt_of(11, 87)[-1]
    assert solo["r11"] == [(first + 3 * step) % VOCAB for step in range(1, len(solo["r11"]) + 1)]


def test_a_row_is_handed_on_without_its_controls(folder: Path, solo: dict[str, list[int]]) -> None:
    harness = Harness(folder, overlap=True, page_size=1, load_format="dummy", max_running_requests=1, logit_processors=PROCESSORS)
    for index in (5, 0):
        submit(harness, index)
    harness.turn(4)
    harness.abort("r5")
    harness.drain()
    harness.submit("none", [3], max_new_tokens=0, frequency_penalty=2.0)
    harness.drain()
    assert harness.ids["r0"] == solo["r0"]
    assert harness.reasons["none"].kind == "length"
    harness.close()


def test_a_step_that_fails_leaves_no_controls_behind(folder: Path, solo: dict[str, list[int]]) -> None:
    harness = Harness(folder, overlap=False, page_size=1, load_format="dummy", max_running_requests=1, logit_processors=PROCESSORS)
    submit(harness, 5)
    harness.turn(3)
    harness.abort("r5")
    launch = harness.runner.launch

    def broken(step: Any) -> Any:
        step.input_ids[:] = np.iinfo(np.int64).max
        return launch(step)

    harness.runner.launch = broken
    harness.submit("lost", [3, 4], max_new_tokens=4)
    harness.turn(2)
    harness.runner.launch = launch
    assert harness.reasons["lost"].kind == "abort"
    submit(harness, 0)
    harness.drain()
    harness.close()
    assert harness.ids["r0"] == solo["r0"]


def test_no_token_left_is_the_requests_own_fault(folder: Path, solo: dict[str, list[int]]) -> None:
    harness = Harness(folder, overlap=True, page_size=1, load_format="dummy", logit_processors=PROCESSORS)
    harness.submit("none", prompt_of(0, 5), allowed_token_ids=[EOS], min_new_tokens=3)
    harness.submit("bad", prompt_of(0, 6), logit_processor="next")
    submit(harness, 0)
    harness.drain()
    harness.close()
    reason: FinishReason = harness.reasons["none"]
    assert (reason.kind, reason.status_code) == ("abort", 400)
    assert harness.reasons["bad"].status_code == 500
    assert harness.ids["r0"] == solo["r0"]
