"""A value that a format writes without quotes: what it is in JSON, and where it ends."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .json_text import JsonValue, dumps, resolved, typed, types_of

MAX_BRANCHES = 3  # levels of anyOf and oneOf that are looked into
_OPENING = re.compile(r"[\s\[{]*")
_JSON = frozenset('"-0123456789tfn]}')  # with what a first name or item begins, or an empty object or array ends


class TypedValue:
    """``put`` in what comes of it, then ask for its ``json``. The schema, within root, says what it is.

    streams: it is a string of any kind, so that each piece of it is one of the string. Other strings are fitted to their schema:
    blanks around them go where the schema has no place for them, since a grammar may allow them there.
    """

    def __init__(self, schema: Any = None, root: Any = None, *, guess: bool, is_string: bool = False) -> None:
        """guess: without types, what can be read as JSON is JSON. is_string: whatever the schema says."""
        self.types = frozenset(["string"]) if is_string else types_of(schema, root)
        self._guess = guess
        self._choices: set[str] = set()
        self._max_length: int | None = None
        self._is_bare = False  # no blanks around it, ever
        for each in _branches(schema, root, MAX_BRANCHES):
            self._learn(each)
        is_text = self.types == {"string"} or not (self.types or guess)
        self.streams = is_text and not (self._choices or self._is_bare or self._max_length is not None)
        self._quotes = None if is_text else _Quotes()
        self._parts: list[str] = []

    def _learn(self, schema: Mapping[str, Any]) -> None:
        enum = schema.get("enum")
        named = [*(enum if isinstance(enum, list) else []), schema.get("const")]
        self._choices.update(each for each in named if isinstance(each, str))
        self._is_bare = self._is_bare or "pattern" in schema or "format" in schema
        length = schema.get("maxLength")
        if isinstance(length, int):
            self._max_length = max(length, self._max_length or 0)

    def put(self, text: str) -> None:
        """Take in the next piece."""
        self._parts.append(text)
        if self._quotes is not None:
            self._quotes.push(text)

    @property
    def is_amid_string(self) -> bool:
        """It is JSON and cannot end here, because one of the strings in it has not."""
        return self._quotes is not None and self._quotes.is_inside

    def json(self) -> str:
        """All that was put in, as one value."""
        text = "".join(self._parts)
        value = typed(text, self.types, guess=self._guess)
        return dumps(self._fitted(text)) if value == dumps(text) else value

    def _fitted(self, text: str) -> str:
        bare = text.strip()
        if text in self._choices or bare in self._choices:
            return text if text in self._choices else bare
        is_long = self._max_length is not None and len(text) > self._max_length
        return bare if self._is_bare or is_long else text


class _Quotes:
    """Whether a text that may be a JSON object or array is amid a string. Python's literals, with their other quotes, are none."""

    def __init__(self) -> None:
        self._first = ""  # character that is no blank
        self._is_known = False  # that it is JSON, as far as the first character behind the opening brackets tells
        self._value: JsonValue | None = JsonValue()

    @property
    def is_inside(self) -> bool:
        return self._value is not None and self._value.is_amid_string

    def push(self, text: str) -> None:
        if self._value is None or self._value.done:
            return
        if not self._is_known:
            match = _OPENING.match(text)
            end = match.end() if match else 0
            self._first = self._first or text.lstrip()[:1]
            self._is_known = end < len(text)
            if self._is_known and (self._first not in ("[", "{") or text[end] not in _JSON):
                self._value = None
                return
        self._value.take(text, 0)
        self._value.pieces()


def _branches(schema: Any, root: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The schema and those that it allows instead."""
    found = resolved(schema, root)
    if not isinstance(found, Mapping):
        return
    yield found
    for key in ("anyOf", "oneOf") if depth else ():
        branches = found.get(key)
        for each in branches if isinstance(branches, list) else ():
            yield from _branches(each, root, depth - 1)
