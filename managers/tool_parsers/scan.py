"""The base of all parsers: a state machine over text that comes in pieces of any size.

Invariant: what a state does depends on the text alone, not on where its pieces end, so any chunking gives the same answer. Between
two pieces only a tail is held back that may become a marker or is a name that has not ended, both bounded; so the work is linear in
the length of the text, however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from .events import CallArguments, CallStart, Event, Text, Tools

MAX_NAME = 256  # characters of a header that holds a tool's name, or of a parameter's name

State = Callable[[str, int, bool], int]


class Marks:
    """Fixed strings that are looked for together. None of them is the beginning of another."""

    def __init__(self, *marks: str) -> None:
        self.marks = tuple(mark for mark in marks if mark)
        self._longest = max(map(len, self.marks))
        self._pattern = re.compile("|".join(map(re.escape, self.marks)))
        self._beginnings = frozenset(mark[:size] for mark in self.marks for size in range(1, len(mark)))
        self._firsts = re.compile("[" + "".join(re.escape(char) for char in sorted({mark[0] for mark in self.marks})) + "]")

    def find(self, text: str, pos: int, end: int | None = None) -> re.Match[str] | None:
        """The first of them before ``end``."""
        return self._pattern.search(text, pos, len(text) if end is None else end)

    def at(self, text: str, pos: int) -> str | None:
        """The one that stands here."""
        match = self._pattern.match(text, pos)
        return match.group() if match else None

    def may_begin(self, text: str, pos: int) -> bool:
        """The rest of the text is a beginning of one of them."""
        rest = text[pos : pos + self._longest]
        return any(mark.startswith(rest) for mark in self.marks)

    def open_len(self, text: str, pos: int) -> int:
        """Characters at the end of text[pos:] that may be the beginning of one of them."""
        for match in self._firsts.finditer(text, max(pos, len(text) - self._longest + 1)):
            if text[match.start() :] in self._beginnings:
                return len(text) - match.start()
        return 0


class CallParser:
    """Finds the calls in one answer. ``feed`` it the text in pieces, then ``finish`` it; both return what is new.

    A state takes (text, pos, final) and returns the position up to which it has taken the text in. Where it returns pos and stays
    the state, it waits for more. With final no more will come. Blanks between text and a call belong to neither.
    """

    markers: ClassVar[tuple[str, ...]] = ()  # strings of the format that a tokenizer may have as special tokens
    starts: ClassVar[tuple[str, ...]] = ()  # those of them that begin a call

    def __init__(self, tools: Tools | None = None) -> None:
        """tools: those that may be called; what looks like a call of another stays text. None: any."""
        self._tools = tools
        self._events: list[Event] = []
        self._held = ""
        self._blanks: list[str] = []  # not yet told: a call may follow
        self._spoken = False
        self._behind_call = False
        self._raw: list[str] = []  # what was read of a call whose name is not known yet
        self._state: State = self._text
        self.num_calls = 0
        self.num_looked = 0  # characters that states were shown, for tests of the cost

    def feed(self, text: str) -> list[Event]:
        """Take in the next piece."""
        self._advance(self._held + text, final=False)
        return self._take()

    def finish(self) -> list[Event]:
        """Nothing more comes. What was held back is told; a call that is cut off keeps the part of its arguments that came."""
        self._advance(self._held, final=True)
        self._end()
        if self._raw or self._held:
            self._refuse(self._held)
        if not self._behind_call:
            self._tell("".join(self._blanks))
        return self._take()

    # --- for subclasses -----------------------------------------------------------------------------------------------------------

    def _text(self, text: str, pos: int, final: bool) -> int:
        """The state outside of calls."""
        raise NotImplementedError

    def _end(self) -> None:
        """The text has ended in the current state."""

    def _say(self, text: str) -> None:
        """Visible text. Blanks at its end wait for what comes next; those behind a call go."""
        if self._behind_call:
            text = text.lstrip()
            if not text:
                return
            self._behind_call = False
        solid = text.rstrip()
        if solid:
            self._tell("".join(self._blanks) + solid)
            self._blanks = []
            self._spoken = True
        if len(solid) < len(text):
            self._blanks.append(text[len(solid) :])

    def _open(self, name: str, call_id: str | None = None) -> bool:
        """A call of this tool begins. False: there is no such tool, and what was read so far has become text."""
        if not name or (self._tools is not None and name not in self._tools):
            self._refuse()
            return False
        self._raw = []
        if not self._spoken:
            self._blanks = []
        self._behind_call = True
        self._events.append(CallStart(self.num_calls, name, call_id))
        self.num_calls += 1
        return True

    def _argue(self, text: str) -> None:
        """Arguments of the newest call."""
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def _refuse(self, rest: str = "") -> None:
        """What was read since a marker, and ``rest``, is no call."""
        raw, self._raw, self._held = "".join(self._raw) + rest, [], ""
        self._state = self._text
        self._say(raw)

    def _until(self, marks: Marks, sink: Callable[[str], None], where: tuple[str, int, bool]) -> tuple[int, str | None]:
        """Give what comes before the first mark to sink, and the mark too. Returns the position behind it, and the mark."""
        text, pos, final = where
        match = marks.find(text, pos)
        if match is not None:
            sink(text[pos : match.start()])
            return match.end(), match.group()
        end = len(text) - (0 if final else marks.open_len(text, pos))
        sink(text[pos:end])
        return end, None

    def _name(self, marks: Marks, where: tuple[str, int, bool]) -> tuple[int, str | None, str]:
        """A short text that ends with a mark: (position behind the mark, text, mark), or (pos, None, "") while it may still come.

        If it cannot come any more, what was read becomes text.
        """
        text, pos, final = where
        limit = pos + MAX_NAME
        match = marks.find(text, pos, limit)
        if match is not None:
            return match.end(), text[pos : match.start()], match.group()
        if final or len(text) >= limit:
            self._refuse()
        return pos, None, ""

    def _advance(self, text: str, *, final: bool) -> None:
        pos = 0
        while pos < len(text):
            state = self._state
            new = state(text, pos, final)
            self.num_looked += new - pos + 1
            if new == pos and state == self._state:
                break
            pos = new
        self._held = text[pos:]
        self.num_looked += len(self._held)

    def _tell(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events
