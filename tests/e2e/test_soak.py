"""A minute of the soak, and that the first request after readiness is like the later ones."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from server import Server, oracle_folder, until
from soak import FAULTS, Sample, Soak


def judged(end: float = 300.0, **more: Callable[[float, random.Random], float]) -> list[str]:
    """The faults of a run of 300 s that is flat and noisy except for what ``more`` adds to a column at a time."""
    draw = random.Random(7)
    soak = Soak(cast("Server", None), seconds=0, clients=1, seed=0)
    soak.end = end

    def at(name: str, when: float) -> float:
        return more[name](when, draw) if name in more else 0.0

    cpu = 0.0
    for number in range(int(end / 2)):
        when = 2.0 * number
        cpu += 2.0 * (1 + at("cpu", when))
        noise = draw.gauss(0, 1)
        soak.samples.append(
            Sample(when, 250e6 + 1e6 * noise + at("rss", when), round(100 + 6 * noise + at("fds", when)), 30, cpu, 40 * number)
        )
        for part in range(20):
            slow = 1 + at("machine", when)
            soak.latencies.append((when + part / 10, slow * (0.005 + draw.expovariate(500)) * (1 + at("latency", when))))
            soak.yardstick.append((when + part / 10, slow * 0.001))
    return [fault.partition(" ")[0] for fault in soak.faults()]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, []),
        ({"rss": lambda when, draw: 0.2e6 * when}, ["RSS"]),
        ({"fds": lambda when, draw: 0.1 * when}, ["descriptors"]),
        ({"fds": lambda when, draw: draw.choice([0, 30])}, []),
        ({"latency": lambda when, draw: 6 if when > 220 else 0}, ["p99"]),
        ({"latency": lambda when, draw: 9 if when > 100 else 0, "machine": lambda when, draw: 9 if when > 200 else 0}, []),
        ({"machine": lambda when, draw: 9 if when > 220 else 0}, []),
        ({"latency": lambda when, draw: 300 if 210 < when < 214 else 0}, []),
        ({"cpu": lambda when, draw: (when / 50) ** 2}, ["a"]),
    ],
    ids=[
        "flat",
        "a leak",
        "lost descriptors",
        "connections that come and go",
        "slower",
        "slower before",
        "a busy machine",
        "a stall",
        "dearer",
    ],
)
def test_what_grows_is_found_and_noise_is_not(more: dict[str, Callable[[float, random.Random], float]], found: list[str]) -> None:
    assert judged(**more) == found


@pytest.mark.nightly
def test_a_minute_of_mixed_load_with_faults(tmp_path: Path) -> None:
    options = ("--max-total-tokens", "4000", "--max-running-requests", "8", "--restart-budget", "0", "--strict")
    server = Server(oracle_folder(tmp_path / "model"), tmp_path / "run", *options, faults=FAULTS)
    try:
        server.wait_ready()
        soak = Soak(server, seconds=60, clients=8, seed=1)
        asyncio.run(soak.run())
        until(server.at_rest)
        assert soak.wrong == []
        assert set(soak.counts) == {"plain", "stream", "schema", "session", "hang_up", "abort", "batch"}
        assert (soak.growth("fds") < 5, soak.growth("threads") < 3) == (True, True)
        server.terminate()
    finally:
        server.close()


@pytest.mark.nightly
@pytest.mark.model
def test_the_first_request_after_readiness_is_like_the_tenth(tmp_path: Path) -> None:
    server = Server("smollm2", tmp_path / "run", load_format="auto")
    times = []
    try:
        server.wait_ready()
        for number in range(10):
            begin = time.monotonic()
            server.generate(text=f"Number {number} is", sampling_params={"max_new_tokens": 16, "temperature": 0})
            times.append(time.monotonic() - begin)
        server.terminate()
    finally:
        server.close()
    assert times[0] < 5 * sorted(times)[5]  # a start that was not warm costs tens of times as much
