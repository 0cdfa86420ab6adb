"""What the backends would ignore is refused or rewritten; what they accept satisfies the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from banyan.managers.constrained.grammar import JSON_SCHEMA, CompiledGrammar, GrammarBackend, Vocabulary, create_backend
from banyan.managers.constrained.schema_check import MAX_DEPTH, candidates
from banyan.managers.constrained.schema_rules import pattern_fault
from banyan.managers.errors import RequestError

BYTES = Vocabulary(tokens=[*(bytes([byte]) for byte in range(256)), b""], stop_ids=(256,))
BACKENDS = ("xgrammar", "llguidance")


@pytest.fixture(scope="module")
def backends() -> dict[str, GrammarBackend]:
    return {name: create_backend(name, BYTES) for name in BACKENDS}


def compiled(backends: dict[str, GrammarBackend], name: str, schema: Any) -> CompiledGrammar:
    (candidate,) = candidates(JSON_SCHEMA, json.dumps(schema), preferred=name, installed=[name])
    return backends[name].load(backends[name].compile(JSON_SCHEMA, candidate.text))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    for byte in text.encode():
        if matcher.is_terminated or not matcher.accept(byte):
            return False
    return matcher.is_terminated or matcher.accept(256)


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
IGNORED: list[tuple[Any, str]] = [  # a schema, and the keyword that xgrammar would not enforce
    ({"type": "array", "uniqueItems": True}, "`uniqueItems` at #"),
    ({"properties": {"a": {"type": "array", "items": {"not": STRING}}}}, "`not` at #/properties/a/items"),
    ({"if": STRING, "then": {"minLength": 2}}, "`if` at #"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "`dependentSchemas` at #"),
    ({"type": "array", "contains": STRING}, "`contains` at #"),
    ({"type": "object", "unevaluatedProperties": False}, "`unevaluatedProperties` at #"),
    ({"type": "string", "minLength": 2, "pattern": "^a*$"}, "`minLength` at #"),
    ({"type": "string", "maxLength": 2, "format": "email"}, "`maxLength` at #"),
    ({"type": "string", "format": "regex"}, "`format` at #"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "`pattern` at #"),
    ({"type": "number", "multipleOf": 0.01}, "`multipleOf` at #"),
    ({"type": "integer", "multipleOf": 7, "maximum": -5}, "`multipleOf` at #"),
    ({"allOf": [STRING, {"maxLength": 1}]}, "`allOf` at #"),
    ({"oneOf": [INTEGER, {"type": "number", "minimum": 2}]}, "`oneOf` at #"),
    ({"anyOf": [STRING], "maxLength": 1}, "`maxLength` at #"),
    ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": STRING}}, "`maxLength` at #"),
    ({"properties": {"a": INTEGER}, "additionalProperties": STRING}, "`additionalProperties` at #"),
    ({"type": "object", "minProperties": 2}, "`minProperties` at #"),
    ({"type": "object", "properties": {"ab": STRING}, "patternProperties": {"^a": INTEGER}}, "`patternProperties` at #"),
    ({"type": "object", "patternProperties": {"^a": STRING, "b$": INTEGER}}, "`patternProperties` at #"),
    ({"minLength": 2, "minimum": 3}, "without a type"),
    ({"type": "string", "nullable": True}, "`nullable` at #"),
    ({"type": "string", "minlength": 2}, "`minlength` at #"),
    ({"$ref": "other.json"}, "`$ref` at #"),
    ({"anyOf": [{"$ref": "#/anyOf/0"}]}, "`$ref` at #/anyOf/0"),
]


@pytest.mark.parametrize(("schema", "message"), IGNORED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_xgrammar_would_ignore_is_refused_by_name(schema: Any, message: str) -> None:
    """GR-10."""
    with pytest.raises(RequestError) as caught:
        candidates(JSON_SCHEMA, json.dumps(schema), preferred="xgrammar", installed=["xgrammar"])
    assert message in str(caught.value) and caught.value.status_code == 400 and caught.value.param == JSON_SCHEMA


def test_another_backend_takes_over(backends: dict[str, GrammarBackend]) -> None:
    schema = {"type": "string", "minLength": 2, "pattern": "^a*$"}
    (candidate,) = candidates(JSON_SCHEMA, json.dumps(schema), preferred="xgrammar", installed=BACKENDS)
    assert candidate.backend == "llguidance" and "minLength" in candidate.refused[0]
    grammar = compiled(backends, "llguidance", schema)
    assert accepts(grammar, '"aa"') and not accepts(grammar, '"a"')


CASES: list[tuple[Any, list[Any], list[Any]]] = [  # schema, some that it accepts, some that it does not
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, [{"a": 1, "b": 2}], [{}, {"a": 1}]),
    ({"required": ["b"]}, [{"b": 1}], [{}]),
    ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    ({"minLength": 2}, ["ab"], ["a"]),
    ({"type": ["string", "integer"], "minLength": 2, "minimum": 3}, ["ab", 3], ["a", 2]),
    ({"type": "array", "items": [INTEGER, STRING]}, [[1, "a"]], [["a"]]),
    ({"oneOf": [{"type": "null"}, STRING]}, [None, "a"], [1]),
    ({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 5}, [3, 4], [2, 5]),
    ({"type": "integer", "format": "int32"}, [2**31 - 1], [2**31]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2021-12-31"], ["2023-02-29", "2021-02-31", "1900-02-29"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256", "01.0.0.0"]),
    ({"enum": ["北京", "ö", "😀"]}, ["北京", "ö", "😀"], ["x"]),
    ({"type": "object", "properties": {"größe": INTEGER}, "required": ["größe"]}, [{"größe": 1}], [{}]),
    ({"type": "string", "pattern": "^a(b7+)?[)?]$"}, ["ab7)", "a?"], ["a7?", "ab?"]),
    ({"type": "string", "format": "time"}, ["07:10:19Z", "07:10:19.71-21:56"], ["07:10:1971-21:56"]),
    ({"type": "string", "maxLength": 2}, ["😀é", ""], ["abc", "\x0b"]),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}}, [{}, {"a": {"a": {}}}], [{"a": 1}]),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/b"}}}, "b": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
        },
        [{"b": [{"b": []}]}],
        [{"b": {}}],
    ),
]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[str(index) for index in range(len(CASES))])
def test_rewritten_schemas(backends: dict[str, GrammarBackend], name: str, schema: Any, good: list[Any], bad: list[Any]) -> None:
    if name == "llguidance" and "format" in schema and schema["type"] == "integer":
        with pytest.raises(RequestError, match="`format` at #"):
            compiled(backends, name, schema)
        return
    grammar = compiled(backends, name, schema)
    for value in good:
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_characters_beyond_ascii_however_the_schema_spells_them(
    backends: dict[str, GrammarBackend], name: str, ascii_only: bool
) -> None:
    """GR-08."""
    schema = {"properties": {"größe": {"enum": ["北京", "ö", "😀"]}, "ü": {"const": "é"}}, "required": ["größe", "ü"]}
    text = json.dumps({"type": "object", "additionalProperties": False, **schema}, ensure_ascii=ascii_only)
    grammar = backends[name].load(backends[name].compile(JSON_SCHEMA, text))
    for value in ("北京", "ö", "😀"):
        assert accepts(grammar, json.dumps({"größe": value, "ü": "é"}, ensure_ascii=False))
    assert not accepts(grammar, json.dumps({"größe": "Ã¶", "ü": "é"}, ensure_ascii=False))


def parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def walk(grammar: CompiledGrammar, rng: random.Random, limit: int = 400) -> str | None:
    """A random text of the grammar, None if it did not end in time. Prefers ends and closing characters."""
    matcher, text = grammar.matcher(), bytearray()
    row = np.zeros(BYTES.mask_width, np.int32)
    while len(text) < limit and not matcher.is_terminated:
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little", count=257))
        assert len(allowed), f"a dead end after {text!r}"
        closing = [byte for byte in allowed.tolist() if byte == 256 or chr(byte) in '"}]']
        token = rng.choice(closing if closing and rng.random() < 0.4 else allowed.tolist())
        assert matcher.accept(token)
        if token != 256:
            text.append(token)
    return text.decode("utf-8", "replace") if matcher.is_terminated else None


@pytest.mark.parametrize("name", BACKENDS)
def test_whatever_a_grammar_can_finish_validates(backends: dict[str, GrammarBackend], name: str) -> None:
    """GR-14: random walks: numbers that never close, raw control characters, missing properties would show."""
    rng = random.Random(7)
    schemas = [
        {"type": "number"},
        {
            "type": "object",
            "properties": {"n": {"type": "number", "minimum": 0.5}, "s": STRING, "b": {"type": "boolean"}},
            "required": ["n"],
        },
        {"type": "array", "items": {"anyOf": [INTEGER, {"type": "null"}, STRING]}, "minItems": 1, "maxItems": 3},
        {"type": "string", "pattern": '^[^"]{1,4}x?$'},
        {},
        *(case[0] for case in CASES),
    ]
    finished = 0
    for schema in schemas:
        try:
            grammar = compiled(backends, name, schema)
        except RequestError:
            assert name == "llguidance"
            continue
        for _ in range(25):
            text = walk(grammar, rng)
            if text is not None:
                finished += 1
                validator = jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator
                assert parses(text), (schema, text)
                validator(schema).validate(json.loads(text))
    assert finished > 150


HOSTILE: list[tuple[str, str]] = [
    ("[" * 10_000 + "]" * 10_000, "levels deep"),
    ('{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000, "levels deep"),
    ('{"items":' * (MAX_DEPTH + 2) + "{}" + "}" * (MAX_DEPTH + 2), "levels deep"),
    (json.dumps({"enum": list(range(60_000))}), "values"),
    ('{"title":"' + "x" * (1 << 20) + '"}', "bytes"),
    ("{", "not valid JSON"),
    ("[]", "a schema is an object"),
    ('{"type":"foo"}', "no type"),
    ('{"minLength":-1,"type":"string"}', "not negative"),
    ('{"type":"object","properties":3}', "must be an object"),
    ('{"$ref":"#/nowhere"}', "nothing at"),
    ('{"type":"integer","minimum":5,"maximum":4}', "nothing satisfies"),
    ('{"enum":[]}', "nothing satisfies"),
    ('{"type":"string","pattern":"' + "(" * 900 + '"}', "too complex|regular expression"),
    ('"\ud800"', "Unicode"),
]


@pytest.mark.parametrize(("text", "message"), HOSTILE, ids=[message + str(index) for index, (_, message) in enumerate(HOSTILE)])
def test_hostile_texts_never_reach_native_code(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        candidates(JSON_SCHEMA, text, preferred="xgrammar", installed=["xgrammar"])


@pytest.mark.parametrize(
    ("pattern", "fine"),
    [
        ("^a|b$", True),
        ('^[^"\\\\]*$', True),
        ("^\\u0041\\.$", True),
        ("a^b", False),
        ("(a$)b", False),
        ('"', False),
        ("\\\\", False),
        ("\\x22", False),
        ("\\n", False),
        ("a\\b", False),
        ("(?!a)b", False),
        ("(a)\\1", False),
        ("(", False),
    ],
)
def test_patterns_in_json(pattern: str, fine: bool) -> None:
    assert (pattern_fault(pattern, in_json=True) == "") is fine


def test_structural_tags_are_checked_inside() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "array", "uniqueItems": True}, "end": "</f>"}], "triggers": ["<f>"]}
    with pytest.raises(RequestError, match="uniqueItems"):
        candidates("structural_tag", json.dumps(tag), preferred="xgrammar", installed=["xgrammar"])
    tag["structures"][0]["schema"] = {"type": "array"}  # type: ignore[index]
    (candidate,) = candidates("structural_tag", json.dumps(tag), preferred="xgrammar", installed=["xgrammar"])
    assert create_backend("xgrammar", BYTES).compile("structural_tag", candidate.text)
