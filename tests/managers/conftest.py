"""Schedulers over the token oracle, for every loop and page size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import CONFIG, Harness


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("oracle")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(
    params=[(False, 1), (False, 16), (True, 1), (True, 16)], ids=lambda p: f"{'overlap' if p[0] else 'normal'}-page{p[1]}"
)
def make(request: pytest.FixtureRequest, folder: Path) -> Any:
    overlap, page_size = request.param
    made: list[Harness] = []

    def build(**options: Any) -> Harness:
        made.append(Harness(folder, overlap=overlap, page_size=page_size, **options))
        return made[-1]

    yield build
    for harness in made:
        harness.close()
