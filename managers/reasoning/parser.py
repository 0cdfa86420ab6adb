"""Splits a model's thinking from its answer, as the text comes.

As with tool calls, one incremental parser serves streams and whole replies, and any chunking gives the same result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from ..tool_parsers.events import Event, Reasoning, Text, Tools, collected
from ..tool_parsers.harmony import Harmony
from ..tool_parsers.registry import create_parser
from ..tool_parsers.scan import Marks
from ..tool_parsers.xtml import KimiK3
from .marks import REASONING_MARKS, ReasoningMarks

HARMONY, XTML = "gpt-oss", "kimi_k3"  # formats in which thinking, answer and calls are parts of one structure
DEFAULT = "think"  # a name of this module's functions: the marks of most models
_BLANK = re.compile(r"\s*")


class OutputParser(Protocol):
    """Text in pieces to events."""

    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class ReasoningParser:
    """Thinking, if there is any, comes first; then one end mark, then the answer, less the blanks around the marks.

    inside: the text begins within the thinking (a start mark may come all the same). stops: other strings that end the thinking and
    belong to the answer, for models that call a tool before they have ended it. A thought without an end has no answer.
    """

    def __init__(self, marks: ReasoningMarks, *, inside: bool, stops: Sequence[str] = ()) -> None:
        self._opening_marks = Marks(marks.start, marks.end)
        self._ends = Marks(marks.end, *stops)
        self._end = marks.end
        self._inside = inside
        self._events: list[Event] = []
        self._held = ""
        self._blanks: list[str] = []
        self._told = False
        self._state = self._opening
        self.thinking = inside
        self.num_looked = 0

    def feed(self, text: str) -> list[Event]:
        """Take in the next piece."""
        self._advance(self._held + text, final=False)
        return self._take()

    def finish(self) -> list[Event]:
        """Nothing more comes."""
        self._advance(self._held, final=True)
        return self._take()

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

    def _opening(self, text: str, pos: int, final: bool) -> int:
        """Blanks, then a mark or not."""
        match = _BLANK.match(text, pos)
        end = match.end() if match else pos
        if end == len(text) and not final:
            self._blanks.append(text[pos:])
            return end
        mark = self._opening_marks.at(text, end) if end < len(text) else None
        if mark is None and not final and self._opening_marks.may_begin(text, end):
            self._blanks.append(text[pos:end])
            return end
        if mark == self._end:  # a thought without words, whose beginning was left out
            self._state = self._think
            return end
        self.thinking = mark is not None or self._inside
        self._state = self._think if self.thinking else self._answer
        if self.thinking:
            self._blanks = []
            return end + len(mark or "")
        self._blanks.append(text[pos:end])
        self._events.append(Text("".join(self._blanks)))
        self._blanks = []
        return end

    def _think(self, text: str, pos: int, final: bool) -> int:
        match = self._ends.find(text, pos)
        if match is None:
            end = len(text) - (0 if final else self._ends.open_len(text, pos))
            self._tell(text[pos:end])
            return end
        self._tell(text[pos : match.start()])
        self._blanks = []
        self.thinking = False
        self._state = self._gap
        return match.end() if match.group() == self._end else match.start()

    def _tell(self, text: str) -> None:
        """Blanks at the beginning and at the end of the thinking are dropped."""
        solid = text.rstrip()
        if solid:
            before = "".join(self._blanks) if self._told else ""
            self._events.append(Reasoning(before + (solid if self._told else solid.lstrip())))
            self._told = True
            self._blanks = []
        if len(solid) < len(text):
            self._blanks.append(text[len(solid) :])

    def _gap(self, text: str, pos: int, final: bool) -> int:
        """Blanks before the answer."""
        match = _BLANK.match(text, pos)
        end = match.end() if match else pos
        if end < len(text):
            self._state = self._answer
        return end

    def _answer(self, text: str, pos: int, final: bool) -> int:
        self._events.append(Text(text[pos:]))
        return len(text)

    def _take(self) -> list[Event]:
        events, self._events = [event for event in self._events if event.text], []  # type: ignore[union-attr]
        return events


class Chain:
    """The text of one parser through another."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Event]:
        return self._through(self._first.feed(text))

    def finish(self) -> list[Event]:
        return self._through(self._first.finish()) + self._second.finish()

    def _through(self, events: list[Event]) -> list[Event]:
        return [new for event in events for new in (self._second.feed(event.text) if isinstance(event, Text) else [event])]


class Verbatim:
    """All of it is the answer."""

    def feed(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def output_parser(
    reasoning: str | None = None, calls: str | None = None, *, tools: Tools | None = None, inside: bool | None = None
) -> OutputParser:
    """The parser of one answer: by a name of --reasoning-parser, one of --tool-call-parser, either or none.

    tools: those that may be called; None: any. inside: whether the answer begins within the thinking; None: as the table says.
    """
    whole = next((name for name in (HARMONY, XTML) if name in (reasoning, calls)), None)
    if whole is not None:
        wanted = {"calls": calls == whole, "reasoning": reasoning == whole}
        first = Harmony(tools, **wanted) if whole == HARMONY else KimiK3(tools, **wanted, inside=bool(inside))
        return first if calls in (whole, None) else Chain(first, create_parser(calls, tools))
    parsers: list[OutputParser] = []
    caller = create_parser(calls, tools) if calls is not None else None
    if reasoning is not None:
        marks = marks_of(reasoning)
        opened = marks.template_opens if inside is None else inside
        parsers.append(ReasoningParser(marks, inside=opened, stops=caller.starts if caller is not None else ()))
    if caller is not None:
        parsers.append(caller)
    if not parsers:
        return Verbatim()
    return parsers[0] if len(parsers) == 1 else Chain(*parsers)


def reasoning_names() -> list[str]:
    """What split_reasoning and marks_of know."""
    return sorted({DEFAULT, *REASONING_MARKS})


def marks_of(name: str) -> ReasoningMarks:
    """The marks behind a name; "think" has the usual ones. Raises KeyError."""
    return REASONING_MARKS["qwen3" if name == DEFAULT else name]


def split_reasoning(text: str, name: str, *, inside: bool | None = None) -> tuple[str, str]:
    """(thinking, answer) of a whole text. Raises KeyError for an unknown name.

    inside: as of output_parser; None: also where the end mark comes without a start mark.
    """
    marks = marks_of(name)
    if inside is None and not marks.template_opens:
        inside = marks.end in text and marks.start not in text.partition(marks.end)[0]
    parser = output_parser(name if name != DEFAULT else "qwen3", inside=inside)
    parsed = collected([*parser.feed(text), *parser.finish()])
    return parsed.reasoning, parsed.text
