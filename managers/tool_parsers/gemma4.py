"""The format of Gemma 4: objects with bare names, and strings between quotes that are tokens of their own.

Arguments become JSON as they come: strings stream, a number or a word is told when it has ended.
"""

from __future__ import annotations

import re

from .events import Tools
from .json_text import JsonValue, dumps, escaped, skip_blanks, typed
from .scan import CallParser, Marks

QUOTE = '<|"|>'
MAX_KEY = 1024  # characters of an argument's name
_BETWEEN = re.compile(r"[\s,]*")
_NAME = re.compile(r"\s*call:\s*(\S+)\s*")


class Gemma4(CallParser):
    """<|tool_call>call:NAME{key:<|"|>text<|"|>,other:12,more:{a:[1,true]}}<tool_call|>. JSON's quotes are understood too."""

    begin, end = "<|tool_call>", "<tool_call|>"
    starts = (begin,)
    markers = (begin, end, QUOTE)

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._outside = Marks(self.begin, self.end)
        self._name_end = Marks("{")
        self._quote = Marks(QUOTE)
        self._key_ends = Marks(":", self.end)
        self._word_ends = Marks(",", "}", "]", self.end)
        self._end_mark = Marks(self.end)
        self._closers: list[str] = []  # of the objects and arrays that are open
        self._first = True  # nothing stands in the innermost of them yet
        self._json = JsonValue()
        self._is_key = False  # of a string in JSON's quotes
        self._parts: list[str] = []  # of a name in quotes, or of a word

    def _text(self, text: str, pos: int, final: bool) -> int:
        pos, mark = self._until(self._outside, self._say, (text, pos, final))
        if mark == self.begin:
            self._raw.append(mark)
            self._state = self._header
        elif mark is not None and not self.num_calls:
            self._say(mark)
        return pos

    def _header(self, text: str, pos: int, final: bool) -> int:
        end, header, _ = self._name(self._name_end, (text, pos, final))
        if header is None:
            return pos
        self._raw.append(text[pos:end])
        found = _NAME.fullmatch(header)
        if self._open(found.group(1) if found else ""):
            self._closers = []
            self._enter("{")
        return end

    # --- inside a call ------------------------------------------------------------------------------------------------------------

    def _enter(self, opener: str) -> None:
        self._argue(opener)
        self._closers.append("}" if opener == "{" else "]")
        self._first = True
        self._state = self._next

    def _leave(self) -> None:
        """The innermost object or array has ended."""
        self._argue(self._closers.pop())
        self._first = False
        self._state = self._next if self._closers else self._closing

    def _next(self, text: str, pos: int, final: bool) -> int:
        """Before a name, an item, or the end of the object or array."""
        match = _BETWEEN.match(text, pos)
        start = match.end() if match else pos
        if start == len(text):
            return start
        if text[start] in "}]":
            self._leave()
            return start + 1
        if self._end_mark.at(text, start):
            self._abandon()
            return start + len(self.end)
        if not final and (self._end_mark.may_begin(text, start) or self._quote.may_begin(text, start)):
            return start
        if self._closers[-1] == "]":
            self._argue("" if self._first else ", ")
            self._first = False
            self._state = self._value
        else:
            self._parts = []
            self._state = self._key
        return start

    def _abandon(self) -> None:
        """The call has ended amid its arguments: they are made whole."""
        self._argue("".join(reversed(self._closers)))
        self._closers = []
        self._state = self._text

    def _key(self, text: str, pos: int, final: bool) -> int:
        quote = self._quote.at(text, pos)
        if quote is not None:
            self._state = self._quoted_key
            return pos + len(quote)
        if text[pos] == '"':
            self._json, self._is_key = JsonValue(), True
            self._state = self._json_string
            return pos
        match = self._key_ends.find(text, pos, pos + MAX_KEY)
        if match is None:
            if not final and len(text) - pos < MAX_KEY:
                return pos
            self._state = self._lost
            return len(text) if final else pos
        if match.group() == self.end:
            self._abandon()
        else:
            self._tell_key(dumps(text[pos : match.start()].strip()))
        return match.end()

    def _quoted_key(self, text: str, pos: int, final: bool) -> int:
        pos, mark = self._until(self._quote, self._parts.append, (text, pos, final))
        if mark is not None:
            self._parts = [dumps("".join(self._parts))]
            self._state = self._colon
        return pos

    def _colon(self, text: str, pos: int, final: bool) -> int:
        """Behind a name in quotes."""
        start = skip_blanks(text, pos)
        if start == len(text):
            return start
        if text[start] != ":":
            self._state = self._lost
            return start
        self._tell_key("".join(self._parts))
        return start + 1

    def _tell_key(self, name: str) -> None:
        self._argue(("" if self._first else ", ") + name + ": ")
        self._first = False
        self._state = self._value

    def _value(self, text: str, pos: int, final: bool) -> int:
        start = skip_blanks(text, pos)
        if start == len(text):
            return start
        quote = self._quote.at(text, start)
        if quote is not None:
            self._argue('"')
            self._state = self._string
            return start + len(quote)
        if not final and self._quote.may_begin(text, start):
            return start
        if text[start] in "{[":
            self._enter(text[start])
            return start + 1
        if text[start] == '"':
            self._json, self._is_key = JsonValue(), False
            self._state = self._json_string
        else:
            self._parts = []
            self._state = self._word
        return start

    def _string(self, text: str, pos: int, final: bool) -> int:
        pos, mark = self._until(self._quote, lambda piece: self._argue(escaped(piece)), (text, pos, False))
        if final and mark is None:  # cut off within its quote
            return len(text)
        if mark is not None:
            self._argue('"')
            self._state = self._next
        return pos

    def _json_string(self, text: str, pos: int, final: bool) -> int:
        end = self._json.take(text, pos)
        if self._is_key:
            self._parts.append(self._json.pieces())
        else:
            self._argue(self._json.pieces())
        if self._json.done:
            self._state = self._colon if self._is_key else self._next
        return end

    def _word(self, text: str, pos: int, final: bool) -> int:
        """A number, true, false, null; what is none of them is a string."""
        match = self._word_ends.find(text, pos)
        if match is None:
            end = len(text) if final else len(text) - self._word_ends.open_len(text, pos)
            self._parts.append(text[pos:end])
            return end
        self._parts.append(text[pos : match.start()])
        self._argue(typed("".join(self._parts).strip(), frozenset(), guess=True))
        self._state = self._next
        return match.start()

    def _lost(self, text: str, pos: int, final: bool) -> int:
        """What stands here is no argument: nothing counts but the call's end."""
        pos, mark = self._until(self._end_mark, lambda _: None, (text, pos, final))
        if mark is not None:
            self._abandon()
        return pos

    def _closing(self, text: str, pos: int, final: bool) -> int:
        """Behind the arguments: the end mark, or text."""
        end = skip_blanks(text, pos)
        if end == len(text):
            return end
        mark = self._end_mark.at(text, end)
        if mark is None and not final and self._end_mark.may_begin(text, end):
            return end
        self._state = self._text
        return end + len(mark or "")
