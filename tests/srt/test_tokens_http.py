"""Tokenising, scores and loads over HTTP."""

from __future__ import annotations

import math
from typing import Any

import pytest

CHAT = [{"role": "user", "content": "hi"}]


def post(served: Any, path: str, **body: Any) -> Any:
    return served.client.post(path, json=body)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_detokenize_are_inverse(served: Any, prefix: str) -> None:
    one = post(served, f"{prefix}/tokenize", prompt="hi", model=None).json()
    assert one == {"tokens": [1, 104, 105], "count": 3, "max_model_len": 200}
    assert post(served, f"{prefix}/tokenize", prompt="hi", add_special_tokens=False).json()["tokens"] == [104, 105]
    several = post(served, f"{prefix}/tokenize", prompt=["a", "", "bc"]).json()
    assert several["tokens"] == [[1, 97], [1], [1, 98, 99]]
    assert several["count"] == [2, 1, 3]
    assert post(served, f"{prefix}/detokenize", tokens=[1, 104, 105]).json() == {"text": "hi"}
    assert post(served, f"{prefix}/detokenize", tokens=[1, 104], skip_special_tokens=False).json() == {"text": "\x01h"}
    assert post(served, f"{prefix}/detokenize", tokens=[[104], []]).json() == {"text": ["h", ""]}
    assert post(served, f"{prefix}/detokenize", tokens=[]).json() == {"text": ""}


def test_a_conversation_is_tokenised_as_the_chat_route_does(served: Any) -> None:
    tokens = post(served, "/tokenize", messages=CHAT).json()["tokens"]
    assert bytes(tokens).decode() == "<user>hi<assistant>"
    assert post(served, "/v1/chat/completions", messages=CHAT).json()["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
        ("/detokenize", {"tokens": [1 << 70]}, "tokens"),
        ("/v1/score", {}, "query"),
        ("/v1/score", {"query": "a", "items": ["b"]}, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [256]}, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": [[5]], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": [5], "items": ["b"], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": [5], "items": [[256]], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a" * 500, "items": ["b"], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "model": "other"}, "model"),
    ],
)
def test_bad_bodies_name_the_field(served: Any, path: str, body: Any, param: str) -> None:
    reply = post(served, path, **body)
    assert reply.status_code == (404 if param == "model" else 400), reply.text
    assert reply.json()["error"]["param"] == param


def test_loads(served: Any) -> None:
    found = served.client.get("/v1/loads", params={"include": "core,disagg,queues,memory"}).json()
    (load,) = found["loads"]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0
    assert load["max_total_num_tokens"] == load["memory"]["token_capacity"] == 1000
    assert "memory" not in served.client.get("/v1/loads", params={"include": "core"}).json()["loads"][0]
    text = served.client.get("/v1/loads", params={"format": "prometheus"}).text
    assert 'sglang_num_running_reqs{dp_rank="0"} 0' in text.splitlines()
    for params in ({"include": "core,x"}, {"format": "xml"}, {"dp_rank": 3}, {"dp_rank": "x"}):
        reply = served.client.get("/v1/loads", params=params)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] in params
    (old,) = served.client.get("/get_load").json()
    assert (old["dp_rank"], old["num_reqs"], old["num_tokens"]) == (0, 0, 0)


def test_names_and_batches_are_bounded(served: Any) -> None:
    for field in ("rid", "extra_key", "cache_salt", "routing_key"):
        reply = post(served, "/generate", text="a", **{field: "x" * 5000})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
    reply = post(served, "/generate", text=["a"] * 1000, sampling_params={"n": 100})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
    assert served.manager.seen == []


def test_softmax_is_over_the_labels_alone() -> None:
    from banyan.managers.scoring import _scores

    meta = {"finish_reason": {"type": "length"}, "output_token_ids_logprobs": [[(-1.0, 5, None), (-3.0, 6, None)]]}
    assert _scores(meta, softmax=False) == [math.exp(-1), math.exp(-3)]
    first, second = _scores(meta, softmax=True)
    assert first + second == pytest.approx(1)
    assert first / second == pytest.approx(math.exp(2))
