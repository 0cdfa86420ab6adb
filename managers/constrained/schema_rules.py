"""What the grammar backends really enforce of JSON Schema, found by experiment, and the narrow forms that make them enforce more.

Every rule errs on the strict side: what a rewritten schema accepts, the schema as given accepts too. Known of xgrammar 0.2.9: it
ignores keywords of a type that is not named, lengths beside a pattern or a format, whatever stands beside anyOf, allOf and $ref,
look-ahead in patterns, and it lets a pattern put quotes and control characters into a string.
"""

from __future__ import annotations

import math
import re
from typing import Any

from .repeats import MAX_REPEATS, least_repeats

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "$comment", "$schema", "$defs", "definitions", "deprecated")
) | {"readOnly", "writeOnly", "discriminator"}
KEYWORDS: dict[str, tuple[str, ...]] = {  # of each type
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "minProperties",
        "maxProperties",
        "patternProperties",
        "propertyNames",
    ),
}
KEYWORDS["integer"] = KEYWORDS["number"]
TYPES = frozenset({*KEYWORDS, "boolean", "null"})

_DAY = r"(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_LEAP = r"([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29"
_DATE = rf"([1-9][0-9]{{3}}-({_DAY})|{_LEAP})"
_HOUR = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9](-?[A-Za-z0-9]){0,30}"
# Formats as patterns where the libraries' own are too loose. These are narrower than the formats: no leap seconds, no years below
# 1000, host names of at most four labels of 61 characters.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_OCTET}(\.{_OCTET}){{3}}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
}
# Formats of numbers with their bounds; those of int64 are as far as the libraries count.
NUMBER_FORMATS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**53), 2**53), "float": None, "double": None}
FORMATS = frozenset(["email", "ipv6", "uuid", "uri", "uri-reference", "json-pointer", "relative-json-pointer"])

MAX_PATTERN = 1 << 14
MAX_MULTIPLE = 256
INTEGER_BOUND = 2**53
NUMBER_RANGE = (1e-4, 1e12)  # magnitudes of bounds of numbers

_PLAIN_ESCAPES = frozenset("dDwWsS.-/()[]{}*+?|^$&,:;=!#%@~_<>' ")
# One character that needs no escape in JSON, as a class: no surrogates, which as UTF-8 are no text.
CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
_PIECES = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # escapes and classes whole, else single characters
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")


def json_type(value: Any) -> str:
    """The type of a JSON value; a whole number is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {float: "number", str: "string", list: "array", dict: "object"}[type(value)]


def is_of_type(value: Any, types: frozenset[str]) -> bool:
    """Whether the value has one of the types."""
    found = json_type(value)
    return found in types or (found == "integer" and "number" in types)


def pattern_fault(pattern: str, *, in_json: bool) -> str:
    """What keeps a pattern from being enforced, empty if nothing. in_json: it describes a string of JSON, inside its quotes.

    The libraries take a pattern to match as a whole, so anchors are allowed where that changes nothing.
    """
    if len(pattern) > MAX_PATTERN:
        return f"is longer than {MAX_PATTERN} characters"
    if least_repeats(pattern) > MAX_REPEATS:
        return f"repeats something more than {MAX_REPEATS} times"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is no regular expression: {error}"
    except (RecursionError, OverflowError):
        return "is too complex"
    return _PatternScan(pattern, in_json=in_json).fault()


def plain_optionals(pattern: str) -> str:
    """The same pattern with (...)? written as (...){0,1}: in strings of JSON, xgrammar 0.2.9 takes (ab+)? for a?b*."""
    pieces = _PIECES.findall(pattern)
    return "".join(
        "{0,1}" if piece == "?" and before == ")" else piece for before, piece in zip(["", *pieces], pieces, strict=False)
    )


class _PatternScan:
    """One pass over a pattern that compiles."""

    def __init__(self, pattern: str, *, in_json: bool) -> None:
        self._pattern, self._in_json = pattern, in_json
        self._at = self._depth = 0
        self._class = ""  # "", "[" or "[^"

    def fault(self) -> str:
        while self._at < len(self._pattern):
            start = self._at
            fault = self._escape() if self._pattern[start] == "\\" else self._plain(self._pattern[start])
            if fault:
                return fault
        return ""

    def _escape(self) -> str:
        self._at += 1
        rest = self._pattern[self._at :]
        code = _CODE.match(rest)
        if code:
            self._at += len(code[0])
            return self._literal(chr(int(code[1] or code[2], 16)))
        self._at += 1
        if rest[:1] in ("\\", '"'):
            return self._literal(rest[:1])
        if rest[:1] in "nrtfv" and not self._in_json:
            return ""
        return "" if rest[:1] in _PLAIN_ESCAPES else f"uses \\{rest[:1]}"

    def _literal(self, char: str) -> str:
        broken = self._in_json and self._class != "[^" and (char in '"\\' or char < " ")
        surrogate = "\ud800" <= char <= "\udfff"
        return f"contains {char!r}, which needs an escape in JSON" if broken else "contains a surrogate" if surrogate else ""

    def _plain(self, char: str) -> str:
        self._at += 1
        if self._class:
            return self._in_class(char)
        if char == "[":
            negated = self._pattern[self._at : self._at + 1] == "^"
            self._class = "[^" if negated else "["
            self._at += negated
            first = self._pattern[self._at : self._at + 1] == "]"
            return "has a class that begins with ]" if first else ""
        return self._anchor_or_group(char)

    def _in_class(self, char: str) -> str:
        if char == "]":
            self._class = ""
            return ""
        return "has [ in a class" if char == "[" else self._literal(char)

    def _anchor_or_group(self, char: str) -> str:
        rest, before = self._pattern[self._at :], self._pattern[: self._at - 1]
        if char == "(":
            self._depth += 1
            if rest.startswith("?") and not rest.startswith("?:"):
                return f"uses (?{rest[1:2]}"
            return ""
        if char == ")":
            self._depth -= 1
        misplaced_start = char == "^" and (self._depth or (before and not before.endswith("|")))
        misplaced_end = char == "$" and (self._depth or (rest and not rest.startswith("|")))
        if misplaced_start or misplaced_end:
            return f"has {char} in its middle"
        return "" if char in "^$" else self._literal(char)


def integer_bounds(node: dict[str, Any]) -> tuple[int | None, int | None]:
    """The bounds of an integer, both inclusive."""
    lows = [math.ceil(node["minimum"])] if "minimum" in node else []
    lows += [math.floor(node["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in node else []
    highs = [math.floor(node["maximum"])] if "maximum" in node else []
    highs += [math.ceil(node["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in node else []
    bounds = NUMBER_FORMATS.get(node.get("format", ""))
    if bounds:
        lows, highs = [*lows, bounds[0]], [*highs, bounds[1]]
    return max(lows, default=None), min(highs, default=None)
