"""Servers that the tests share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server import Server, oracle_folder, running

VARIANTS = {
    "overlap, pages of 1": ["--page-size", "1"],
    "no overlap, pages of 16, a small pool": [
        *("--page-size", "16", "--disable-overlap-schedule", "--max-total-tokens", "512", "--context-length", "256"),
        *("--chunked-prefill-size", "32", "--max-running-requests", "2", "--schedule-policy", "lpm"),
    ],
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the tiny tokenizer and config of the oracle."""
    return oracle_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Default options."""
    with running(model, tmp_path_factory.mktemp("s"), *VARIANTS["overlap, pages of 1"]) as server:
        yield server


@pytest.fixture(scope="session")
def narrow(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Everything small, the other loop: two running requests, 512 slots in pages of 16, prompts in chunks of 32, context 256."""
    with running(model, tmp_path_factory.mktemp("s"), *VARIANTS["no overlap, pages of 16, a small pool"]) as server:
        yield server


@pytest.fixture(params=["plain", "narrow"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Either of the shared servers; it must be as well after the test as before."""
    served: Server = request.getfixturevalue(request.param)
    served.check()
    yield served
    served.check()


@pytest.fixture
def start(model: str, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server for one test; see Server for the arguments."""
    started: list[Server] = []

    def make(*options: str, **more: Any) -> Server:
        started.append(Server(more.pop("model", model), tmp_path / f"s{len(started)}", *options, **more))
        return started[-1]

    yield make
    for one in started:
        one.close()
