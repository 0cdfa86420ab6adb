"""The OpenAPI document says what the server does: a fuzzer that reads it finds no server error and nothing undocumented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banyan.managers.generation import GenerateInput
from banyan.managers.sampling_params import SamplingParams
from banyan.managers.sessions.sessions import SessionParams
from banyan.srt.generate_schema import GENERATE_BODY, SAMPLING
from banyan.srt.openai.protocol import ChatBody, CompletionBody

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


def test_the_schema_names_every_field_and_its_default() -> None:
    """Of /generate, its sampling parameters and sessions: what is read is told, and nothing else."""
    for kind, schema in (
        (GenerateInput, GENERATE_BODY),
        (SamplingParams, SAMPLING),
        (SessionParams, GENERATE_BODY["properties"]["session_params"]),
    ):
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        for field in msgspec.structs.fields(kind):
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if default not in (None, msgspec.NODEFAULT):  # a null may stand for what is worked out later
                assert schema["properties"][field.name]["default"] == default, field.name


def test_the_schema_of_the_openai_routes_has_every_default(served: Any) -> None:
    schemas = served.client.get("/openapi.json").json()["components"]["schemas"]
    for body in (ChatBody, CompletionBody):
        told = schemas[body.__name__]["properties"]
        assert set(told) == {field.alias or name for name, field in body.model_fields.items()}
        for name, field in body.model_fields.items():
            if not field.is_required() and isinstance(field.default, bool | int | float | str):
                assert told[field.alias or name]["default"] == field.default, name
