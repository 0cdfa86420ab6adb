"""The cache explained, cache hints, records and crash dumps, over the real processes and the token oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import Server

from banyan import Engine, EngineDeadError, RequestError
from banyan.managers.decisions.replay import replay

TWO = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
SYSTEM = "You are a helpful assistant. Today is Monday, and the weather is fine. Answer in one short sentence. "


@pytest.fixture(scope="module", params=[(1, False), (16, True)], ids=lambda p: f"page{p[0]}-overlap{p[1]}")
def engine(model: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    page_size, overlap = request.param
    with Engine(
        model_path=model,
        load_format="oracle",
        page_size=page_size,
        max_total_tokens=2048,
        disable_overlap_schedule=not overlap,
        strict=True,
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        assert request.getfixturevalue("engine").flush_cache(timeout=10).success


def test_a_space_in_the_system_prompt_is_found(engine: Engine) -> None:
    engine.generate(SYSTEM + "Where is the key?", TWO)
    good = engine.explain_cache(SYSTEM + "Who are you?")
    bad = engine.explain_cache(SYSTEM.replace("Today", " Today") + "Who are you?")
    page_size = engine.tokenizer_manager.info.page_size
    assert good["would_hit"] > bad["would_hit"] == bad["nearest"]["departs_at"] // page_size * page_size
    nearest = bad["nearest"]
    assert "assistant.  Today is" in nearest["prompt_text"]
    assert "assistant. Today is" in nearest["cached_text"]
    assert nearest["agree_again"] > 20
    assert f"at token {nearest['departs_at']}" in bad["reason"]
    answer: Any = engine.generate(SYSTEM + "Who are you?", TWO)
    assert answer["meta_info"]["cached_tokens"] == good["would_hit"], "asking changed nothing and told the truth"


def test_the_hottest_prefix_is_the_system_prompt(engine: Engine) -> None:
    for index in range(3):
        engine.generate(f"{SYSTEM}{index} What is the time?", TWO)
    report = engine.radix_cache(k=2)
    first = report["hottest"][0]
    assert first["hits"] == 3
    assert SYSTEM.startswith(first["first_text"].removeprefix("<s>")[:40])
    assert report["protected"] == 0
    assert report["size_tokens"] == report["evictable"] >= first["num_tokens"]


def test_tenants_do_not_see_each_other(engine: Engine) -> None:
    engine.generate(SYSTEM, TWO, extra_key="a", cache_salt="pepper")
    engine.generate(SYSTEM, TWO, extra_key="b")
    for options in ({}, {"extra_key": "a"}, {"cache_salt": "pepper"}):
        found = engine.explain_cache(SYSTEM, **options)
        assert (found["would_hit"], found["nearest"]) == (0, None)
        assert found["namespaces"] == {"other_seen": 1, "would_hit_more": 1}, "the salted one is not looked at"
    assert engine.explain_cache(SYSTEM, extra_key="a", cache_salt="pepper")["would_hit"] > 0
    assert {prefix["last_text"] for prefix in engine.radix_cache()["hottest"]} == {None}


def test_conversations_are_explained_through_the_template(engine: Engine) -> None:
    try:
        found = engine.explain_cache(messages=[{"role": "user", "content": "a"}])
    except RequestError as error:
        assert error.param == "messages"
    else:
        assert found["num_tokens"] > 0
    with pytest.raises(RequestError):
        engine.explain_cache("a", messages=[{"role": "user", "content": "a"}])


def test_pinned_tokens_are_told(engine: Engine) -> None:
    hint = {"pin_seconds": 60}
    answer: Any = engine.generate(SYSTEM, TWO, cache_hint=hint)
    pinned = answer["meta_info"]["pinned_tokens"]
    page_size = engine.tokenizer_manager.info.page_size
    assert pinned == answer["meta_info"]["prompt_tokens"] // page_size * page_size > 0
    state = engine.get_server_info()["internal_states"][0]
    assert (state["num_pinned_tokens"], state["memory_balanced"]) == (pinned, True)
    refused: Any = engine.generate("a b c " * 200, TWO, cache_hint=hint)
    assert refused["meta_info"]["pinned_tokens"] == 0
    plain: Any = engine.generate("a", TWO)
    assert "pinned_tokens" not in plain["meta_info"]
    with pytest.raises(RequestError, match="pin_seconds"):
        engine.generate("a", TWO, cache_hint={"pin_seconds": -1})
    assert engine.flush_cache(timeout=10).success
    assert engine.radix_cache()["size_tokens"] == 0


def test_over_http(plain: Server) -> None:
    assert httpx.post(f"{plain.url}/flush_cache?timeout=30", timeout=60).status_code == 200
    httpx.post(f"{plain.url}/generate", json={"text": SYSTEM, "sampling_params": TWO}, timeout=30)
    report = httpx.get(f"{plain.url}/radix_cache?k=50", timeout=30).json()
    assert any(prefix["first_text"] and "helpful" in prefix["first_text"] for prefix in report["hottest"])
    found = httpx.post(f"{plain.url}/radix_cache/explain", json={"text": SYSTEM}, timeout=30).json()
    assert found["would_hit"] == found["num_tokens"] - 1


def run_replay(path: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "banyan", "replay", str(path)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("overlap", [False, True])
def test_a_server_is_recorded_and_replayed(model: str, tmp_path: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_FAULTS", "retract_every=7")
    path = tmp_path / "record.jsonl"
    options: dict[str, Any] = {"page_size": 16, "max_total_tokens": 512, "target_itl_ms": 50.0 if overlap else None}
    with Engine(
        model_path=model, load_format="oracle", record_decisions=path, disable_overlap_schedule=not overlap, **options
    ) as engine:
        prompts = [f"{SYSTEM}{index}" for index in range(12)]
        engine.generate(prompts, {"max_new_tokens": 12, "temperature": 0, "stop": ["e"]}, cache_hint={"pin_seconds": 0.2})
        engine.generate(prompts, {"max_new_tokens": 40, "temperature": 1, "ignore_eos": True})
        for prompt in prompts[:3]:
            engine.generate(prompt, TWO)
    text = path.read_text()
    assert "helpful" not in text
    status, output = run_replay(path)
    assert (status, output.splitlines()[-1:]) == (0, [output.strip()]), output
    assert output.endswith("turns checked, no difference\n")
    lines = [json.loads(line) for line in text.splitlines()]
    changed = next(line for line in lines[20:] if line.get("batch"))
    changed["batch"]["slots"] ^= 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, output = run_replay(path)
    assert status == 1
    assert f"turn {changed['turn']} differs in batch.slots:" in output


def test_a_scheduler_that_dies_leaves_its_last_turns(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_FAULTS", "scheduler_die=60")
    folder = tmp_path / "dumps"
    with (
        Engine(model_path=model, load_format="oracle", crash_dump_folder=folder, restart_budget=0) as engine,
        pytest.raises(EngineDeadError, match="scheduler"),
    ):
        engine.generate(SYSTEM, {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True})
    (path,) = folder.glob("banyan-crash-*.jsonl")
    assert "helpful" not in path.read_text()
    header = json.loads(path.read_text().splitlines()[0])
    assert header["crash"].startswith("RuntimeError\n"), "the message of a foreign error might quote a prompt"
    assert "scheduler.py" in header["crash"]
    result = replay(str(path))
    assert result.difference is None
    assert result.num_turns > 40
    assert "so does the replay" in result.note
