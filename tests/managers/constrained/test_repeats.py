"""Grammars that force millions of characters are refused before any native code sees them."""

from __future__ import annotations

import json

import pytest

from banyan.managers.constrained.repeats import least_repeats, repeats_of_rules
from banyan.managers.constrained.schema_check import candidates
from banyan.managers.errors import RequestError


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("", 1),
        ("a*b+c?", 1),
        ("a{3}b{2,}c{4,9}d{,5}", 4),
        (r"(\d{3}-){5}x{7}", 15),
        ("((a{10}){10}b){10}", 1000),
        (r"\{99\}[{99}]", 1),
        ("[a]]{6}", 6),
        ('"{9}', 9),
        ("(" * 9, 1),
        (")" * 9 + "{8}", 8),
        ("a{99999999999999999999}", 999999999999),
    ],
)
def test_repetitions_are_multiplied_where_they_stand_within_each_other(pattern: str, count: int) -> None:
    assert least_repeats(pattern) == count


def test_rules_may_stand_within_each_other() -> None:
    assert repeats_of_rules('root ::= x{20} "{99}"\nx ::= ("a" y){3}\ny ::= [0-9]{2}') == 120


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a{1000000}"),
        ("regex", "(((((a{100}){100}){100}){100}){100})"),
        ("ebnf", 'root ::= "a"{1000000}'),
        ("ebnf", 'root ::= x{1000}\nx ::= "a"{1000}'),
        ("json_schema", json.dumps({"type": "string", "pattern": "^a{1000000}$"})),
        ("json_schema", json.dumps({"type": "array", "items": {"const": 1}, "minItems": 10**5})),
        (
            "structural_tag",
            json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "(a{1000}){1000}"}}),
        ),
    ],
)
def test_too_many_are_refused(kind: str, text: str) -> None:
    with pytest.raises(RequestError, match=r"10000|65535|large"):
        candidates(kind, text, preferred="xgrammar", installed=["xgrammar"])


@pytest.mark.parametrize(("kind", "text"), [("regex", r"(\d{3}\.){3}\d{3}"), ("ebnf", 'root ::= "a"{100}')])
def test_usual_ones_are_not(kind: str, text: str) -> None:
    assert candidates(kind, text, preferred="xgrammar", installed=["xgrammar"])
