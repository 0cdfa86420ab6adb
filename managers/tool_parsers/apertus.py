"""The format of Apertus: each call is a member of a JSON object, the tool's name with its arguments."""

from __future__ import annotations

import re

from .events import Tools
from .json_calls import ArgumentsParser
from .json_text import JsonValue, loads, skip_blanks
from .scan import Marks

_BETWEEN = re.compile(r"[\s,]*")


class Apertus2509(ArgumentsParser):
    """<|tools_prefix|>[{"NAME": {...}}, {"NAME": {...}}]<|tools_suffix|>"""

    begin, end = "<|tools_prefix|>", "<|tools_suffix|>"
    starts = (begin,)
    markers = (begin, end)

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._outside = Marks(self.begin, self.end)
        self._suffix = Marks(self.end)
        self._called = False  # there was a call since the begin mark

    def _text(self, text: str, pos: int, final: bool) -> int:
        pos, mark = self._until(self._outside, self._say, (text, pos, final))
        if mark == self.begin:
            self._raw.append(mark)
            self._called = False
            self._state = self._between
        elif mark is not None and not self.num_calls:
            self._say(mark)
        return pos

    def _between(self, text: str, pos: int, final: bool) -> int:
        """Outside of the objects."""
        end = self._skip(text, pos)
        if end == len(text):
            return end
        if text[end] == "{" or (text[end] == "[" and not self._called):
            self._raw.append(text[end])
            self._state = self._member if text[end] == "{" else self._between
            return end + 1
        self._over()
        return end + (self._called and text[end] == "]")

    def _member(self, text: str, pos: int, final: bool) -> int:
        """Inside an object, before a name."""
        end = self._skip(text, pos)
        if end == len(text):
            return end
        if text[end] == '"':
            self._value, self._parts = JsonValue(), []
            self._state = self._member_name
        elif text[end] == "}" and self._called:
            self._raw = []
            self._state = self._between
            return end + 1
        else:
            self._over()
        return end

    def _member_name(self, text: str, pos: int, final: bool) -> int:
        end = self._value.take(text, pos)
        self._raw.append(text[pos:end])
        self._parts.append(self._value.pieces())
        if self._value.done:
            self._state = self._colon
        return end

    def _colon(self, text: str, pos: int, final: bool) -> int:
        end = skip_blanks(text, pos)
        self._raw.append(text[pos:end])
        if end == len(text):
            return end
        if text[end] != ":":
            self._over()
            return end
        self._raw.append(":")
        try:
            name = str(loads("".join(self._parts)))
        except ValueError:
            name = ""
        if self._open(name):
            self._called = True
            self._expect_arguments()
        return end + 1

    def _behind_arguments(self) -> None:
        self._state = self._member

    def _skip(self, text: str, pos: int) -> int:
        """Blanks and commas. They are kept as long as they may turn out to be text."""
        match = _BETWEEN.match(text, pos)
        end = match.end() if match else pos
        if not self._called:
            self._raw.append(text[pos:end])
        return end

    def _over(self) -> None:
        """No further call can come."""
        if self._called:
            self._raw = []
            self._state = self._closing
        else:
            self._refuse()

    def _closing(self, text: str, pos: int, final: bool) -> int:
        """Behind the last call: the end mark, or text."""
        end = skip_blanks(text, pos)
        if end == len(text):
            return end
        mark = self._suffix.at(text, end)
        if mark is None and not final and self._suffix.may_begin(text, end):
            return end
        self._state = self._text
        return end + len(mark or "")
