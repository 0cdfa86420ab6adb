"""Reports of the cache over a scheduler on the token oracle, and their texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import CONFIG, Harness

from banyan.managers.cache_control import CACHE_OFF, CacheControl, explanation_of, report_of, with_texts
from banyan.managers.io_struct import CacheReportReq, ControlReply, ExplainCacheReq, pack_ids


class Letters:
    """Token n is the n-th letter after A, at any size."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(chr(65 + id) for id in ids)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made: list[Harness] = []

    def build(**options: Any) -> Harness:
        made.append(Harness(tmp_path, **{"overlap": True, "page_size": 1, **options}))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


def control_of(harness: Harness) -> tuple[CacheControl, list[ControlReply]]:
    replies: list[ControlReply] = []
    return CacheControl(harness.memory.cache, replies.append, "default"), replies


def test_the_report_counts_what_the_scheduler_did(make: Callable[..., Harness]) -> None:
    harness = make()
    system = list(range(10, 110))
    for index in range(4):
        harness.submit(f"r{index}", [*system, 200 + index], max_new_tokens=1)
        harness.drain()
    control, replies = control_of(harness)
    control.report(CacheReportReq(call_id=7, k=2))
    (reply,) = replies
    assert reply.call_id == 7
    report = with_texts(reply.state, Letters())
    assert report["enabled"] and report["complete"]
    assert (report["size_tokens"], report["evictable"], report["protected"], report["num_nodes"]) == (104, 104, 0, 5)
    assert (report["query_tokens"], report["hit_tokens"], report["hit_rate"]) == (400, 300, 0.75)
    first = report["hottest"][0]
    letters = "".join(chr(65 + id) for id in system)
    assert (first["num_tokens"], first["hits"], first["in_use"]) == (100, 4, False)
    assert (first["first_text"], first["last_text"]) == (letters[:80], letters)
    assert len(report["hottest"]) == 2
    assert "head" not in first


def test_a_named_namespace_has_no_text(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.submit("r", list(range(10, 60)), extra_key="tenant", max_new_tokens=1)
    harness.drain()
    (prefix,) = with_texts(report_of(harness.memory.cache, 10), Letters())["hottest"]
    assert (prefix["num_tokens"], prefix["first_text"], prefix["last_text"]) == (50, None, None)


def test_the_explanation_is_what_the_next_request_gets(make: Callable[..., Harness]) -> None:
    harness = make()
    system = list(range(10, 110))
    harness.submit("a", system, max_new_tokens=1)
    harness.submit("other", [*range(200, 300)], extra_key="t", max_new_tokens=1)
    harness.drain()
    control, replies = control_of(harness)
    prompt = [*system[:30], 5, *system[30:], 6]
    control.explain(ExplainCacheReq(call_id=1, input_ids=pack_ids(prompt)))
    answer = explanation_of(replies[0].state, Letters())
    harness.submit("b", prompt, max_new_tokens=1)
    harness.drain()
    assert answer["would_hit"] == harness.cached["b"] == 30
    assert answer["namespaces"] == {"other_seen": 1, "would_hit_more": 0}
    nearest = answer["nearest"]
    assert nearest["departs_at"] == 30
    assert nearest["prompt_text"] == "".join(chr(65 + id) for id in prompt[6:54])
    assert nearest["cached_text"] == "".join(chr(65 + id) for id in system[6:54])
    assert (nearest["prompt_token_ids"], nearest["cached_token_ids"]) == (prompt[30:38], system[30:38])
    assert (nearest["prompt_extra"], nearest["cached_extra"], nearest["agree_again"]) == (1, 0, 70)
    control.explain(ExplainCacheReq(call_id=2, input_ids=pack_ids([*range(200, 300)])))
    hidden = explanation_of(replies[1].state, Letters())
    assert hidden["namespaces"] == {"other_seen": 1, "would_hit_more": 1}
    assert hidden["nearest"]["cached_text"] == "".join(chr(65 + id) for id in system[:24])


def test_without_a_cache_the_answers_say_so(make: Callable[..., Harness]) -> None:
    control, replies = control_of(make(disable_radix_cache=True))
    control.report(CacheReportReq(call_id=1))
    control.explain(ExplainCacheReq(call_id=2, input_ids=pack_ids([1, 2])))
    assert not with_texts(replies[0].state, Letters())["enabled"]
    answer = explanation_of(replies[1].state, Letters())
    assert (answer["would_hit"], answer["reason"]) == (0, CACHE_OFF)
