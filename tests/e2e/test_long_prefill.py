"""A real model: the server lives, and says so, through a forward pass of a minute; and it is as quick at once as later."""

from __future__ import annotations

import statistics
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from server import running, until

pytestmark = [pytest.mark.model, pytest.mark.nightly]

NUM_PROMPTS, NUM_TOKENS = 3, 4000
LONG = 20.0  # seconds, after which servers that ask for a token call themselves dead
VOCAB = 49152


def test_livez_answers_while_one_forward_pass_takes_a_minute(tmp_path: Path) -> None:
    """Prompts that are never split, computed in one step. Liveness is that of the loops, readiness goes on as well."""
    ids = np.random.default_rng(0).integers(16, VOCAB, (NUM_PROMPTS, NUM_TOKENS)).tolist()
    options = ("--chunked-prefill-size", "-1", "--max-prefill-tokens", str(NUM_PROMPTS * NUM_TOKENS), "--weight-cache-bytes", "0")
    with running("smollm2", tmp_path, *options, load_format="auto") as server:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        replies: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: replies.append(httpx.post(server.url + "/generate", json=body, timeout=1200)))
        asking.start()
        probes = {"/livez": 0, "/readyz": 0, "/health": 0}
        while asking.is_alive():
            for path in probes:
                assert server.http.get(path, timeout=10).status_code == 200, path
                probes[path] += 1
            asking.join(0.2)
        assert replies[0].status_code == 200, replies[0].text
        longest = max(one["meta_info"]["prefill_time"] for one in replies[0].json())
        print(f"prefill of {longest:.0f} s, {probes['/livez']} probes of each kind")
        assert longest > LONG, "a machine as fast as this needs a longer prompt here"
        assert min(probes.values()) > 10
        until(server.at_rest)


def test_the_first_request_after_ready_is_as_quick_as_the_tenth(tmp_path: Path) -> None:
    with running("smollm2", tmp_path, load_format="auto") as server:
        rng = np.random.default_rng(1)

        def seconds() -> float:
            params: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
            reply = server.generate(input_ids=rng.integers(16, VOCAB, 64).tolist(), sampling_params=params)
            return float(reply["meta_info"]["e2e_latency"])

        times = [seconds() for _ in range(10)]
    print("seconds:", [round(time, 3) for time in times])
    assert times[0] < 3 * statistics.median(times[5:])
