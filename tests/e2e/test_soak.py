"""A minute of the soak, and that the first request after readiness is like the later ones."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from server import Server, oracle_folder, until
from soak import FAULTS, Soak


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
        assert (soak.growth(2) < 5, soak.growth(3) < 3) == (True, True)
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
