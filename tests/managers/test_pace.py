"""PrefillPace against devices whose step time is known."""

from __future__ import annotations

import msgspec
import pytest

from banyan.managers.config import ModelInfo, RunnerConfig, SchedulerConfig
from banyan.managers.ipc import IpcNames
from banyan.managers.pace import FIRST_CHUNK, MIN_CHUNK, PrefillPace, explain_pace, with_pace


def run(pace: PrefillPace, base: float, cost: float, growth: float = 0.0, steps: int = 60) -> list[float]:
    """Step times of a device with t = base + (cost + growth * step) * tokens, a pure decode step now and then."""
    times = []
    for step in range(steps):
        tokens = pace.chunk if step % 5 else 0
        elapsed = base + (cost + growth * step) * tokens
        pace.observe(elapsed, tokens, 4)
        times.append(elapsed)
    return times


@pytest.mark.parametrize(("base", "cost"), [(0.03, 0.0015), (0.01, 0.0002), (0.05, 0.0005)])
def test_steps_stay_under_the_target_and_use_it(base: float, cost: float) -> None:
    pace = PrefillPace(0.1, max_chunk=4096, page_size=1)
    times = run(pace, base, cost)
    settled = [time for i, time in enumerate(times) if i > 10 and i % 5]
    assert max(settled) <= 0.1
    assert min(settled) >= 0.08


def test_growing_attention_is_followed() -> None:
    times = run(PrefillPace(0.1, max_chunk=4096, page_size=1), 0.03, 0.001, growth=2e-5)
    assert max(times[10:]) <= 0.2


def test_a_target_that_cannot_be_met_gives_the_smallest_chunk() -> None:
    pace = PrefillPace(0.01, max_chunk=4096, page_size=1)
    run(pace, 0.05, 0.001)
    assert pace.chunk == MIN_CHUNK


def test_chunks_are_whole_pages_and_never_longer_than_allowed() -> None:
    pace = PrefillPace(10.0, max_chunk=512, page_size=16)
    assert pace.chunk == FIRST_CHUNK
    run(pace, 0.01, 0.0001)
    assert pace.chunk == 512
    assert PrefillPace(0.001, max_chunk=512, page_size=64).chunk == 64


def test_a_slow_model_gets_slack() -> None:
    """Steps of half a second are no reason to compute prompts by the sixteen tokens."""
    pace = PrefillPace(0.25, max_chunk=512, page_size=1, slack=4.0)
    times = run(pace, 0.5, 0.02)
    settled = [time for i, time in enumerate(times) if i > 10 and i % 5]
    assert 1.7 <= min(settled) <= max(settled) <= 2.0


def test_short_prompts_alone_say_nothing_of_a_token() -> None:
    """Their steps are as long as reading the weights."""
    pace = PrefillPace(0.25, max_chunk=512, page_size=1)
    pace.observe(0.02, 0, 4)
    pace.observe(0.25, 500, 0)
    chunk = pace.chunk
    for _ in range(20):
        pace.observe(0.02, 4, 0)
    assert pace.chunk == chunk


NAMES = IpcNames(directory="", scheduler="", detokenizer="", tokenizer="")
CONFIG = SchedulerConfig(ipc=NAMES, runner=RunnerConfig(model_path=""), tokenizer_path="")
MODEL = ModelInfo(
    model_type="llama",
    architectures=[],
    vocab_size=8,
    context_len=8,
    eos_token_ids=[],
    bos_token_id=None,
    dtype="float32",
    device="cpu",
    attention_backend="cpu",
    load_format="auto",
)


@pytest.mark.parametrize(
    ("given", "model", "target", "why"),
    [
        ({}, {}, 250.0, "250, the default on cpu, or 4 decode steps where these are longer"),
        ({"target_itl_ms": 80.0}, {}, 80.0, "80, as given"),
        ({"target_itl_ms": 0.0}, {}, 0.0, "off: streams wait for the prompts that come, as given"),
        ({"enable_mixed_chunk": True}, {}, None, "off"),
        ({"prefill_decode_interval": 2}, {}, None, "off"),
        ({"chunked_prefill_size": -1}, {}, None, "off"),
        ({}, {"device": "cuda"}, None, "off"),
        ({}, {"load_format": "oracle"}, None, "off"),
        ({}, {"stages": 2}, None, "off"),
    ],
)
def test_where_there_is_a_target_by_default(given: dict, model: dict, target: float | None, why: str) -> None:
    config = with_pace(msgspec.structs.replace(CONFIG, **given), msgspec.structs.replace(MODEL, **model))
    assert config.target_itl_ms == target
    assert explain_pace(config).startswith(why)


def test_small_changes_are_no_news() -> None:
    pace = PrefillPace(0.1, max_chunk=4096, page_size=1)
    assert pace.news() == FIRST_CHUNK
    assert pace.news() is None
    pace.observe(0.03, 0, 4)
    pace.observe(0.03 + 0.06, 60, 4)
    assert pace.news() == 60 or pace.news() is None
    pace.observe(0.03 + 0.24, 60, 4)
    assert pace.news() == MIN_CHUNK or pace.chunk == MIN_CHUNK
