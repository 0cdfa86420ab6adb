"""[f(a=1, b="x"), g()]: calls as a Python list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from .events import Tools
from .json_text import dumps, python_value, skip_blanks
from .scan import MAX_NAME, CallParser, Marks

_HEADER = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
_HEADER_BEGINNING = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*)?")
_NEXT = re.compile(r"\s*,\s*([A-Za-z_][\w.]*)\s*\(")
_NEXT_BEGINNING = re.compile(r"\s*(,\s*([A-Za-z_][\w.]*\s*)?)?")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_KEY_BEGINNING = re.compile(r"\s*([A-Za-z_]\w*\s*=?)?")
_IN_QUOTES = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_PLAIN = re.compile(r"[^\"'()\[\]{},\\]*")


class Pythonic(CallParser):
    """Arguments are told one by one, each when it is whole. Those without a name get the names of the schema in its order."""

    starts: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._bracket = Marks("[", *self.markers)
        self._names: list[str] = []
        self._num_arguments = 0
        self._key_name = ""
        self._parts: list[str] = []  # of a value
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _text(self, text: str, pos: int, final: bool) -> int:
        match = self._bracket.find(text, pos)
        if match is None:
            pos, _ = self._until(self._bracket, self._say, (text, pos, final))
            return pos
        self._say(text[pos : match.start()])
        if match.group() != "[":
            return match.end()
        self._state = self._list
        return match.start()

    def _list(self, text: str, pos: int, final: bool) -> int:
        """A bracket: a name and a parenthesis make it a list of calls."""
        match = _HEADER.match(text, pos, pos + MAX_NAME)
        if match is not None:
            self._raw.append(match.group())
            self._call(match.group(1))
            return match.end()
        if not final and _may_become(_HEADER_BEGINNING, text, pos):
            return pos
        self._state = self._text
        self._say(text[pos])
        return pos + 1

    def _call(self, name: str) -> None:
        if not self._open(name):
            return
        properties = (self._tools or {}).get(name, {}).get("properties")
        self._names = list(properties) if isinstance(properties, Mapping) else []
        self._num_arguments = 0
        self._argue("{")
        self._state = self._argument

    def _argument(self, text: str, pos: int, final: bool) -> int:
        """The beginning of an argument, or the end of the call."""
        start = skip_blanks(text, pos)
        if start == len(text):
            return start
        if text[start] == ")":
            self._argue("}")
            self._state = self._behind
            return start + 1
        if text[start] == ",":
            return start + 1
        match = _KEY.match(text, start, start + MAX_NAME)
        if not final and (match is None or match.end() == len(text)) and _may_become(_KEY_BEGINNING, text, start):
            return start
        names = self._names[self._num_arguments : self._num_arguments + 1]
        self._key_name = match.group(1) if match else (names[0] if names else f"arg{self._num_arguments}")
        self._parts, self._depth = [], 0
        self._state = self._value
        return match.end() if match else start

    def _value(self, text: str, pos: int, final: bool) -> int:
        """One value, up to the comma or parenthesis behind it."""
        while pos < len(text):
            if self._quote:
                pos = self._string(text, pos)
                continue
            match = _PLAIN.match(text, pos)
            end = match.end() if match else pos
            if end == len(text):
                self._parts.append(text[pos:])
                return end
            char = text[end]
            if not self._depth and char in ",)]}":
                self._parts.append(text[pos:end])
                self._tell_argument()
                self._state = self._argument
                return end if char in ",)" else end + 1
            self._depth += (char in "([{") - (char in ")]}")
            self._quote = char if char in "\"'" else ""
            self._parts.append(text[pos : end + 1])
            pos = end + 1
        return pos

    def _string(self, text: str, pos: int) -> int:
        if self._escaped:
            self._escaped = False
            self._parts.append(text[pos])
            return pos + 1
        match = _IN_QUOTES[self._quote].match(text, pos)
        end = match.end() if match else pos
        self._parts.append(text[pos : end + 1].replace("\n", "\\n"))
        if end < len(text):
            self._escaped = text[end] == "\\"
            self._quote = self._quote if self._escaped else ""
        return min(end + 1, len(text))

    def _tell_argument(self) -> None:
        self._argue((", " if self._num_arguments else "") + f"{dumps(self._key_name)}: {python_value(''.join(self._parts))}")
        self._num_arguments += 1
        self._parts = []

    def _behind(self, text: str, pos: int, final: bool) -> int:
        """Behind a call: another one, or the end of the list."""
        match = _NEXT.match(text, pos, pos + 2 * MAX_NAME)
        if match is not None:
            if self._tools is None or match.group(1) in self._tools:
                self._call(match.group(1))
            else:
                self._state = self._text
                return pos
            return match.end()
        if not final and _may_become(_NEXT_BEGINNING, text, pos):
            return pos
        end = skip_blanks(text, pos)
        self._state = self._text
        return end + 1 if text.startswith("]", end) else pos


class Lfm2(Pythonic):
    """The same between <|tool_call_start|> and <|tool_call_end|>."""

    starts = ("<|tool_call_start|>",)
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")


def _may_become(beginning: re.Pattern[str], text: str, pos: int) -> bool:
    """All the rest of the text is such a beginning, and not too long."""
    return len(text) - pos < MAX_NAME and beginning.fullmatch(text, pos) is not None
