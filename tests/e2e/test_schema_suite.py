"""Schemas of others and drawn ones on a real model at temperature 1: what finishes validates, what is not enforced is a 400.

tests/data/json_schema_suite_200.json holds schemas of the JSON Schema Test Suite, with its licence and how they were drawn.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from banyan import Engine, RequestError

DATA = Path(__file__).parent.parent / "data" / "json_schema_suite_200.json"
NUM_SYNTHETIC = 100
MAX_TOKENS = 48

pytestmark = pytest.mark.model


def suite() -> list[tuple[str, Any]]:
    return [(f"{file}: {description}", schema) for file, description, schema in json.loads(DATA.read_text())["cases"]]


def synthetic() -> list[tuple[str, Any]]:
    rng = random.Random(5)
    return [(f"synthetic {index}", _schema(rng, 3)) for index in range(NUM_SYNTHETIC)]


def _schema(rng: random.Random, depth: int) -> Any:
    """Mostly of what is enforced, now and then with what is not."""
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern"] + (
        ["object", "object", "array", "anyOf"] if depth else []
    )
    kind = rng.choice(kinds)
    low = rng.randrange(-50, 50)
    if kind == "string":
        return {"type": "string", "maxLength": rng.randrange(1, 9)}
    if kind == "integer":
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(300)} | (
            {"multipleOf": 2} if rng.random() < 0.1 else {}
        )
    if kind == "number":
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + 7.5}
    if kind == "enum":
        return {"enum": rng.sample(["ö", "北京", 3, None, True, "a b", '"', -1.5], rng.randrange(1, 5))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(x|yy)-[0-9]+$", "^[^ ]{1,5}$"])}
    if kind == "array":
        extra = {"uniqueItems": True} if rng.random() < 0.1 else {}
        return {"type": "array", "items": _schema(rng, depth - 1), "minItems": rng.randrange(3), "maxItems": 3} | extra
    if kind == "anyOf":
        return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "object":
        names = rng.sample(["id", "größe", "tags", "a b", "n"], rng.randrange(1, 4))
        required = rng.sample(names, rng.randrange(len(names) + 1))
        closed = {"additionalProperties": False} if rng.random() < 0.7 else {"maxProperties": 3}
        return {"type": "object", "properties": {name: _schema(rng, depth - 1) for name in names}, "required": required} | closed
    return {"type": kind}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="smollm2", max_running_requests=16, max_total_tokens=16384, context_length=1024) as engine:
        yield engine


def check(engine: Engine, cases: list[tuple[str, Any]]) -> Counter[str]:
    """How many ended how. Whatever finished is valid JSON of its schema, and every refusal is a 400 that says of what."""

    async def ask(schema: Any) -> Any:
        params = {"json_schema": json.dumps(schema), "temperature": 1.0, "max_new_tokens": MAX_TOKENS}
        return await engine.async_generate(prompt="Some JSON:", sampling_params=params)

    async def ask_all() -> list[Any]:
        gate = asyncio.Semaphore(16)

        async def one(schema: Any) -> Any:
            async with gate:
                return await ask(schema)

        return await asyncio.gather(*(one(schema) for _, schema in cases), return_exceptions=True)

    ends: Counter[str] = Counter()
    for (name, schema), answer in zip(cases, asyncio.run(ask_all()), strict=True):
        if isinstance(answer, BaseException):
            assert isinstance(answer, RequestError), (name, answer)
            assert answer.status_code == 400 and answer.param == "json_schema", (name, answer)
            ends["refused"] += 1
            continue
        reason = answer["meta_info"]["finish_reason"]
        assert reason["type"] in ("stop", "length"), (name, schema, reason)
        ends[reason["type"]] += 1
        if reason["type"] == "stop":
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer["text"]))
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"{name}: {answer['text']!r} for {json.dumps(schema)}: {error}") from None
    return ends


def test_a_sample_of_both(engine: Engine) -> None:
    ends = check(engine, suite()[::18] + synthetic()[::20])
    assert sum(ends.values()) == 17 and ends["stop"] >= 5


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_all_of_the_suite(engine: Engine) -> None:
    ends = check(engine, suite())
    assert sum(ends.values()) == 200 and ends["stop"] >= 50 and ends["refused"] < 120


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_all_that_are_drawn(engine: Engine) -> None:
    ends = check(engine, synthetic())
    assert sum(ends.values()) == NUM_SYNTHETIC and ends["stop"] >= 50 and ends["refused"] < 40
