"""A huge prompt does not hold the others up: waits for a probe while it is tokenised, beside those of the idle server before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from server import Server

MORE = 0.05  # seconds by which the median may grow, beyond twice the idle one
MAX_GAP = 0.25  # seconds by which the 95th of a hundred may grow
IDLE_SECONDS = 3.0
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate, 1 MB": ("/generate", {"text": "word and number " * 66_000}),
    "generate": ("/generate", {"text": "word and number " * 330_000}),
    "completions": ("/v1/completions", {"prompt": "word and number " * 330_000}),
    "tokenize": ("/tokenize", {"prompt": "word and number " * 330_000}),
}


def waits(client: httpx.Client, going_on: Callable[[], bool]) -> list[float]:
    """Seconds for each probe, sorted."""
    found: list[float] = []
    while going_on() or not found:
        begin = time.perf_counter()
        assert client.get("/livez").status_code == 200
        found.append(time.perf_counter() - begin)
        time.sleep(0.02)
    return sorted(found)


def at(values: list[float], share: float) -> float:
    return values[min(int(len(values) * share), len(values) - 1)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROMPTS)
def test_probes_are_answered_while_megabytes_are_tokenised(plain: Server, name: str) -> None:
    path, body = PROMPTS[name]
    replies: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: replies.append(httpx.post(plain.url + path, json=body, timeout=120)))
    with httpx.Client(base_url=plain.url, timeout=60) as client:
        end = time.monotonic() + IDLE_SECONDS
        idle = waits(client, lambda: time.monotonic() < end)
        asking.start()
        busy = waits(client, asking.is_alive)
    told = [
        f"{kind}: {len(each)} probes, {at(each, 0.5) * 1e3:.0f} ms, at most {each[-1] * 1e3:.0f}"
        for kind, each in (("idle", idle), ("busy", busy))
    ]
    print(f"{name}: {'; '.join(told)}")
    assert replies[0].status_code == (200 if path == "/tokenize" else 400)
    assert at(busy, 0.5) < 2 * at(idle, 0.5) + MORE
    assert at(busy, 0.95) < 2 * at(idle, 0.95) + MAX_GAP
