"""JSON that comes in pieces: where a value ends, and an object that is a call."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ..nesting import MAX_DEPTH, check_depth

_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_BLANK = re.compile(r"\s*")
MAX_REFERENCES = 16  # that one schema leads to another by
_SCALAR = re.compile(r"[^\s,;}\]{\[\":<]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonValue:
    """Takes in one JSON value and knows where it ends. Control characters in strings are escaped on the way.

    kind: its first character, "" before it came.
    """

    def __init__(self) -> None:
        self.kind = ""
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._pieces: list[str] = []

    def take(self, text: str, pos: int) -> int:
        """Take in what belongs to the value from pos on; returns the position behind it."""
        if not self.kind:
            pos = _end_of(_BLANK, text, pos)
            if pos == len(text):
                return pos
            self.kind = text[pos]
        while pos < len(text) and not self.done:
            if self._in_string:
                pos = self._take_string(text, pos)
            elif self._depth or self.kind in '{["':
                pos = self._take_outside(text, pos)
            else:
                end = _end_of(_SCALAR, text, pos)
                self._pieces.append(text[pos:end])
                self.done = end < len(text)
                pos = end
        return pos

    @property
    def is_amid_string(self) -> bool:
        """The last character taken in is within a string of it."""
        return self._in_string

    def end(self) -> None:
        """No more text comes: a bare word or number ends with it."""
        self.done = self.done or (bool(self.kind) and self.kind not in '{["')

    def pieces(self) -> str:
        """What was taken in since the last call."""
        pieces, self._pieces = "".join(self._pieces), []
        return pieces

    def _take_string(self, text: str, pos: int) -> int:
        if self._escaped:
            self._escaped = False
            self._pieces.append(text[pos])
            return pos + 1
        end = _end_of(_IN_STRING, text, pos)
        self._pieces.append(_CONTROL.sub(_escape, text[pos:end]))
        if end == len(text):
            return end
        self._pieces.append(text[end])
        if text[end] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._depth
        return end + 1

    def _take_outside(self, text: str, pos: int) -> int:
        end = _end_of(_OUTSIDE, text, pos)
        if end < len(text):
            char = text[end]
            end += 1
            if char == '"':
                self._in_string = True
            else:
                self._depth += 1 if char in "{[" else -1
                self.done = not self._depth
        self._pieces.append(text[pos:end])
        return end


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]


def _end_of(pattern: re.Pattern[str], text: str, pos: int) -> int:
    match = pattern.match(text, pos)
    return match.end() if match else pos


def skip_blanks(text: str, pos: int) -> int:
    """The position of the next character that is no blank."""
    return _end_of(_BLANK, text, pos)


def escaped(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def dumps(value: Any) -> str:
    """Strict JSON. Raises ValueError for what it has no word for, a lone surrogate in a string among it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    text.encode()
    return text


def loads(text: str) -> Any:
    """Strict JSON whose numbers are finite and whose strings are Unicode. Raises ValueError, for more than MAX_DEPTH levels too."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth("JSON", value)
    if "\\" in text or "e" in text or "E" in text:  # what an escape or an exponent may have made
        dumps(value)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# --- values that a format writes without quotes -----------------------------------------------------------------------------------


def resolved(schema: Any, root: Any) -> Any:
    """A schema without the local references at its top; what cannot be followed stays."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        found = root
        for key in reference[1:].split("/")[1:]:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = found
    return schema


def property_of(schema: Any, root: Any, name: str) -> Any:
    """The schema of an object's member; None: it does not say."""
    found = resolved(schema, root)
    properties = found.get("properties") if isinstance(found, Mapping) else None
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return found.get("additionalProperties") if isinstance(found, Mapping) else None


def items_of(schema: Any, root: Any) -> Any:
    """The schema of an array's items; None: it does not say."""
    found = resolved(schema, root)
    return found.get("items") if isinstance(found, Mapping) else None


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that a schema within root allows at its top; empty: it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            kinds = [
                types_of({**resolved(each, root), "anyOf": None, "oneOf": None}, None)
                for each in branches
                if isinstance(resolved(each, root), Mapping)
            ]
            return frozenset().union(*kinds) if all(kinds) else frozenset()
    return frozenset(map(_type_of, schema["enum"])) if isinstance(schema.get("enum"), list) else frozenset()


def typed(text: str, types: frozenset[str], *, guess: bool) -> str:
    """A value as JSON: of one of the types if it can be read so, else a string. guess: without types, JSON is JSON."""
    word = text.strip()
    if types == {"string"} or not (types or guess):
        return dumps(text)
    if word.lower() in ("true", "false", "none") and types & {"boolean", "null"}:
        word = word.lower().replace("none", "null")
    for read in (loads, _literal):
        try:
            value = read(word)
            if not types or _type_of(value) in types or (_type_of(value) == "integer" and "number" in types):
                return dumps(value)
        except (ValueError, TypeError):
            continue
    return dumps(text)


def _literal(text: str) -> Any:
    """A Python literal. Raises ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            return ast.literal_eval(text)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("no literal") from None


def python_value(text: str) -> str:
    """A Python or JSON value as JSON; what is neither is a string."""
    if text.strip().isidentifier():
        return _WORDS.get(text.strip(), dumps(text.strip()))
    for read in (_literal, loads):
        try:
            return dumps(read(text.strip()))
        except (ValueError, TypeError):
            continue
    return dumps(text.strip())


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "")
