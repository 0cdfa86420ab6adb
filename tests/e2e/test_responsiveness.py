"""A huge prompt does not hold the others up: the gaps between answers to a probe, measured beside it."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from server import Server

MAX_GAP = 0.25  # seconds
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"text": "word and number " * 330_000}),
    "completions": ("/v1/completions", {"prompt": "word and number " * 330_000}),
    "tokenize": ("/tokenize", {"prompt": "word and number " * 330_000}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROMPTS)
def test_probes_are_answered_while_5_mb_are_tokenised(plain: Server, name: str) -> None:
    path, body = PROMPTS[name]
    replies: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: replies.append(httpx.post(plain.url + path, json=body, timeout=120)))
    waits: list[float] = []
    with httpx.Client(base_url=plain.url, timeout=60) as client:
        client.get("/livez")
        asking.start()
        while asking.is_alive():
            begin = time.perf_counter()
            assert client.get("/livez").status_code == 200
            waits.append(time.perf_counter() - begin)
            time.sleep(0.02)
    print(f"{name}: {len(waits)} probes, worst {max(waits) * 1e3:.0f} ms")
    assert replies[0].status_code == (200 if path == "/tokenize" else 400)
    assert max(waits) < MAX_GAP
