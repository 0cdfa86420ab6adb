"""Structured output of a real model at temperature 1: whatever finishes validates, what cannot be enforced is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from banyan import Engine, RequestError

STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": name} for name in ("string", "integer", "number", "boolean", "null"))
SHORT = {"type": "string", "maxLength": 12}
PERSON = {"type": "object", "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}}
SCHEMAS: list[Any] = [
    BOOLEAN,
    INTEGER,
    NUMBER,
    NULL,
    SHORT,
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}( [0-9]+)?$"},
    {"type": "string", "pattern": "^[ab]+c$", "minLength": 4, "maxLength": 8},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "ipv4", "uuid", "email", "hostname")),
    {"enum": ["北京", "ö", "😀", 3, None]},
    {"const": {"a": [1, "x"]}},
    {"type": "integer", "minimum": -17, "maximum": 2500},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": 0.5, "exclusiveMaximum": 20},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [BOOLEAN, SHORT], "items": False, "minItems": 2},
    PERSON,
    {**PERSON, "required": ["name", "age", "extra"]},
    {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^k[0-9]$": BOOLEAN}, "maxProperties": 2},
    {"type": "object", "properties": {"größe": NUMBER, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}}},
    {"anyOf": [NULL, {"type": "object", "properties": {"v": BOOLEAN}, "required": ["v"]}]},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": k}, k: INTEGER}, "required": ["kind", k]} for k in ("x", "y")]},
    {"type": ["string", "null"], "maxLength": 5},
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"properties": {"next": {"anyOf": [NULL, {"$ref": "#/$defs/node"}]}}, "required": ["next"]}},
    },
    {
        "type": "object",
        "properties": {"p": {"allOf": [{"$ref": "#/definitions/p"}]}},
        "definitions": {"p": PERSON},
        "required": ["p"],
    },
]
REFUSED = [({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"not": STRING}, "not"), ({"if": STRING, "then": {}}, "if")]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="smollm2", max_running_requests=32, max_total_tokens=16384, context_length=2048) as engine:
        yield engine


@pytest.mark.model
@pytest.mark.timeout(900)
def test_whatever_finishes_validates(engine: Engine) -> None:
    schemas = SCHEMAS[::2]
    params = [{"json_schema": json.dumps(schema), "temperature": 1.0, "max_new_tokens": 40} for schema in schemas]
    outputs = engine.generate(prompt=["Some JSON:"] * len(schemas), sampling_params=params)
    finished = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output["meta_info"]["finish_reason"]["type"] in ("stop", "length"), output
        if output["meta_info"]["finish_reason"]["type"] == "stop":
            finished += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(output["text"]))
    assert finished > len(schemas) * 2 // 3


@pytest.mark.model
@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
def test_what_cannot_be_enforced_is_refused(engine: Engine, schema: Any, keyword: str) -> None:
    with pytest.raises(RequestError, match=f"`{keyword}` at #") as caught:
        engine.generate(prompt="x", sampling_params={"json_schema": schema})
    assert caught.value.status_code == 400


@pytest.mark.model
def test_regex_ebnf_and_structural_tags(engine: Engine) -> None:
    def text_of(**grammar: Any) -> str:
        params = {**grammar, "temperature": 1.0, "max_new_tokens": 24}
        return str(engine.generate(prompt="x", sampling_params=params)["text"])

    assert set(text_of(regex="[ab]{5}")) <= {"a", "b"}
    assert text_of(ebnf='root ::= "yes" | "no"') in ("yes", "no")
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": BOOLEAN}, "end": "</f>"}
    assert text_of(structural_tag={"type": "structural_tag", "format": tag}) in ("<f>true</f>", "<f>false</f>")


@pytest.mark.model
@pytest.mark.parametrize(
    ("grammar", "why"),
    [({"ebnf": "root ::= root"}, "never comes to an end"), ({"json_schema": {"$ref": "#"}}, "No token is left")],
)
def test_a_grammar_that_no_text_follows_is_the_clients_error(engine: Engine, grammar: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        engine.generate(prompt="x", sampling_params=grammar)
    assert caught.value.status_code == 400
