"""GET /radix_cache and POST /radix_cache/explain, over a manager that answers by script."""

from __future__ import annotations

from typing import Any

import pytest

from banyan.managers.io_struct import CacheHint, FinishReason, unpack_ids


def test_report(served: Any) -> None:
    assert served.client.get("/radix_cache").json() == {"size_tokens": 0, "hottest": [], "k": 10}
    assert served.client.get("/radix_cache?k=3").json()["k"] == 3


@pytest.mark.parametrize("k", ["-1", "101", "many"])
def test_report_refuses(served: Any, k: str) -> None:
    reply = served.client.get(f"/radix_cache?k={k}")
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"text": "ab"}, [1, 97, 98]),
        ({"input_ids": [5, 6]}, [5, 6]),
        ({"messages": [{"role": "user", "content": "a"}]}, list(b"<user>a<assistant>")),
        ({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}, list(b"<user>a")),
    ],
)
def test_explain(served: Any, body: dict[str, Any], ids: list[int]) -> None:
    reply = served.client.post("/radix_cache/explain", json={**body, "extra_key": "x", "cache_salt": "y"})
    assert reply.json() == {"num_tokens": len(ids), "would_hit": 0, "nearest": None}
    (message,) = served.manager.seen
    assert unpack_ids(message.input_ids).tolist() == ids
    assert (message.extra_key, message.cache_salt) == ("x", "y")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ["a", "b"]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"input_ids": [999]}, "input_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"text": "a", "extra_key": 1}, "extra_key"),
    ],
)
def test_explain_refuses(served: Any, body: dict[str, Any], param: str) -> None:
    reply = served.client.post("/radix_cache/explain", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


PROMPTS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("route", PROMPTS)
def test_cache_hint_reaches_the_scheduler(served: Any, route: str) -> None:
    hint = {"pin_seconds": 2.5, "priority": 3}
    reply = served.client.post(route, json={**PROMPTS[route], "cache_hint": hint})
    assert reply.status_code == 200
    assert served.manager.seen[0].cache_hint == CacheHint(pin_seconds=2.5, priority=3)


@pytest.mark.parametrize("hint", [{"pin_seconds": -1}, {"priority": 1001}, {"pin": 1}, "long"])
@pytest.mark.parametrize("route", PROMPTS)
def test_bad_cache_hint(served: Any, route: str, hint: Any) -> None:
    reply = served.client.post(route, json={**PROMPTS[route], "cache_hint": hint})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("cache_hint")


def test_pinned_tokens_are_told(served: Any) -> None:
    served.manager.end = FinishReason(kind="stop", matched=2, pinned_tokens=16)
    reply = served.client.post("/generate", json={"text": "a"}).json()
    assert reply["meta_info"]["pinned_tokens"] == 16
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
