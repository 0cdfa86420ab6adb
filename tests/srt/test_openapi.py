"""The OpenAPI document says what the server does: a fuzzer that reads it finds no server error and nothing undocumented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_document(served: Any) -> None:
    document = served.client.get("/openapi.json").json()
    assert "422" not in str(document["paths"])
    for path in (
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/flush_cache",
        "/abort_request",
        "/health",
        "/radix_cache",
        "/radix_cache/explain",
    ):
        assert path in document["paths"]
    assert document == served.client.get("/openapi.json").json()


def test_fuzzed(served: Any, tmp_path: Path) -> None:
    tool = Path(sys.executable).with_name("schemathesis")
    command = [str(tool), "run", served.url + "/openapi.json", "--checks", CHECKS, "--phases", "fuzzing", "-n", "6", "--seed", "1"]
    command += ["--exclude-path", "/drain"]  # all that follows would be refused
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_fuzzed_for_minutes(served: Any, tmp_path: Path) -> None:
    tool = Path(sys.executable).with_name("schemathesis")
    command = [str(tool), "run", served.url + "/openapi.json", "--checks", "not_a_server_error", "--phases", "fuzzing", "-n", "150"]
    done = subprocess.run(
        [*command, "--exclude-path", "/drain", "--max-time", "180"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
