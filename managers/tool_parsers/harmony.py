"""The harmony format of gpt-oss: messages with a channel each.

analysis is thinking, final is the answer, and a message to a function is a call.
"""

from __future__ import annotations

import re

from .events import Reasoning, Tools
from .json_calls import ArgumentsParser
from .scan import MAX_NAME, Marks

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(ArgumentsParser):
    """Thinking and calls in one, since both are messages. Begins at the role of an assistant's message, as the prompt leaves it.

    Text outside of messages is part of the answer.
    """

    starts = ()
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def __init__(self, tools: Tools | None = None, *, calls: bool = True, reasoning: bool = True) -> None:
        """calls, reasoning: tell these as what they are; else as text."""
        super().__init__(tools)
        self._calls = calls
        self._reasoning = reasoning
        self._outside = Marks(START, CHANNEL, MESSAGE, *ENDS)
        self._header_end = Marks(MESSAGE)
        self._body_end = Marks(START, CHANNEL, *ENDS)
        self._kind = ""
        self._thought = False  # something was told as thinking

    def _text(self, text: str, pos: int, final: bool) -> int:
        pos, mark = self._until(self._outside, self._say, (text, pos, final))
        if mark in (START, CHANNEL):
            self._raw.append(mark)
            self._state = self._header
        return pos

    def _header(self, text: str, pos: int, final: bool) -> int:
        match = self._header_end.find(text, pos, pos + 2 * MAX_NAME)
        if match is None:
            if final or len(text) - pos >= 2 * MAX_NAME:
                self._refuse()
            return pos
        header = "".join(self._raw) + text[pos : match.start()]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        self._kind = channel.group(1) if channel else "final"
        if recipient is not None and self._calls:
            self._raw.append(text[pos : match.end()])
            if self._open(recipient.group(1).removeprefix("functions.")):
                self._expect_arguments()
            return match.end()
        self._raw = []
        if self._kind != "analysis":
            self._break()
        elif self._thought:
            self._think("\n")
        self._state = self._body
        return match.end()

    def _break(self) -> None:
        """Two messages of the answer are two lines."""
        if self._spoken:
            self._blanks = ["\n"]

    def _body(self, text: str, pos: int, final: bool) -> int:
        sink = self._think if self._kind == "analysis" and self._reasoning else self._say
        pos, mark = self._until(self._body_end, sink, (text, pos, final))
        self._close(mark)
        return pos

    def _close(self, mark: str | None) -> None:
        if mark in (START, CHANNEL):
            self._raw.append(mark)
            self._state = self._header
        elif mark is not None:
            self._state = self._text

    def _think(self, text: str) -> None:
        if text and self._reasoning:
            self._thought = True
            self._events.append(Reasoning(text))

    def _behind_arguments(self) -> None:
        self._state = self._rest

    def _rest(self, text: str, pos: int, final: bool) -> int:
        """Behind the arguments nothing counts but the message's end."""
        pos, mark = self._until(self._body_end, lambda _: None, (text, pos, final))
        self._close(mark)
        return pos
