"""A grammar that may force a text without bound is refused when it is compiled, however it is written."""

from __future__ import annotations

import json

import pytest

from banyan.managers.constrained.forced_length import MAX_FORCED
from banyan.managers.constrained.grammar import Vocabulary
from banyan.managers.constrained.xgrammar_backend import XGrammarBackend
from banyan.managers.errors import RequestError

DOUBLED = {
    f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "items": False, "minItems": 2} for i in range(20)
}
DOUBLING_RULES = "\n".join(f"{chr(97 + i)} ::= {chr(98 + i)} {chr(98 + i)}" for i in range(24))
NESTED = {"type": "array", "items": {"type": "array", "items": {"const": 1}, "minItems": 9000}, "minItems": 9000}


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(Vocabulary(tokens=[bytes([byte]) for byte in range(256)] + [b"</s>"], stop_ids=(256,)))


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("ebnf", 'root ::= "a" root', "never comes to an end"),
        ("ebnf", 'root ::= "x" | "a" loop\nloop ::= "b" loop', "never comes to an end"),
        ("ebnf", f'root ::= a\n{DOUBLING_RULES}\ny ::= "1"', "force 16777216 bytes"),
        ("ebnf", 'root ::= "x" | "y" z{40000}\nz ::= "1" | "2"', "force 40001 bytes"),
        ("regex", "(a{1000}){1000}", "force 1000000 bytes"),
        ("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": {**DOUBLED, "d20": {"const": 1}}}), "force 5242876 bytes"),
        ("json_schema", json.dumps(NESTED), "may force"),
        ("json_schema", json.dumps({"const": "a" * (MAX_FORCED + 1)}), "may force"),
        (
            "json_schema",
            json.dumps({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}),
            "never comes to an end",
        ),
    ],
)
def test_refused(backend: XGrammarBackend, kind: str, text: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as raised:
        backend.compile(kind, text)
    assert raised.value.param == kind


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ebnf", 'root ::= "a" root | ""'),
        ("ebnf", 'root ::= "a" b{3} | [^\\x00-\\x1f"]\nb ::= "" | "x" b'),
        ("regex", r"(\d{3}-){5}x{7}|.*"),
        ("regex", "()"),
        ("regex", "^$"),
        ("ebnf", 'root ::= ""'),
        ("json_schema", '{"type": "object"}'),
        ("json_schema", json.dumps({"type": "string", "pattern": "^é{300}[b-d]+$"})),
        ("json_schema", json.dumps({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})),
        ("json_schema", json.dumps({"const": "a" * (MAX_FORCED - 100)})),
    ],
)
def test_usual(backend: XGrammarBackend, kind: str, text: str) -> None:
    matcher = backend.load(backend.compile(kind, text)).matcher()
    assert len(matcher.forced_text()) <= MAX_FORCED
