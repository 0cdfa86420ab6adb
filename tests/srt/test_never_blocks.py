"""What may take long runs beside the event loop: while one request is stuck in it, another is answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from banyan.srt import http_io

CHAT = [{"role": "user", "content": "hi"}]


class Stuck:
    """Makes a function stand still until it is let go, and knows that it was entered."""

    def __init__(self, call: Any) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self._call = call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.entered.set()
        assert self.go_on.wait(20)
        return self._call(*arguments, **named)


@pytest.fixture
def stuck_encode(served: Any) -> Iterator[Stuck]:
    stuck = Stuck(served.manager.tokenizer.encode)
    served.manager.tokenizer.encode = stuck
    yield stuck
    stuck.go_on.set()


def answered_meanwhile(served: Any, stuck: Stuck, path: str, content: bytes) -> None:
    replies: list[httpx.Response] = []
    headers = {"content-type": "application/json"}

    def ask() -> None:
        replies.append(httpx.post(served.url + path, content=content, headers=headers, timeout=30))

    asking = threading.Thread(target=ask)
    asking.start()
    assert stuck.entered.wait(20)
    for _ in range(3):
        assert httpx.get(served.url + "/livez", timeout=10).status_code == 200
    assert not replies
    stuck.go_on.set()
    asking.join(20)
    assert replies[0].status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/tokenize", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
        ("/radix_cache/explain", {"messages": CHAT}),
    ],
)
def test_templates_and_tokenisers(served: Any, stuck_encode: Stuck, path: str, body: Any) -> None:
    answered_meanwhile(served, stuck_encode, path, httpx.Request("POST", "http://x", json=body).content)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_large_bodies(served: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    stuck = Stuck(http_io.json_object)
    monkeypatch.setattr(http_io, "json_object", stuck)
    body = {"text": "a", "prompt": "a", "messages": CHAT, "unknown": "x" * (2 * http_io.THREAD_BYTES)}
    answered_meanwhile(served, stuck, path, httpx.Request("POST", "http://x", json=body).content)
