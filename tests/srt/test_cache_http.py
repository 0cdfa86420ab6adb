"""GET /radix_cache and POST /radix_cache/explain, over a manager that answers by script."""

from __future__ import annotations

from typing import Any

import pytest

from banyan.managers.io_struct import unpack_ids


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
