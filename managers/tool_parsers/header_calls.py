"""Formats in which a header with the tool's name comes before the JSON of the arguments: deepseek, kimi."""

from __future__ import annotations

import re
from typing import ClassVar

from .events import Tools
from .json_calls import ArgumentsParser
from .scan import Marks

_TAIL = re.compile(r"[\s`]*")


class HeaderCalls(ArgumentsParser):
    """section begin, then of each call: call_begin, header, separator, JSON, call_end; then section end."""

    section: ClassVar[tuple[str, str]] = ("", "")
    call_begin: ClassVar[str] = ""
    separator: ClassVar[str] = ""
    call_end: ClassVar[str] = ""

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._marks = Marks(*self.section, self.call_begin, self.call_end)
        self._header_end = Marks(self.separator)

    def _text(self, text: str, pos: int, final: bool) -> int:
        """Marks of sections and of ends are no text, wherever they stand."""
        pos, mark = self._until(self._marks, self._say, (text, pos, final))
        if mark == self.call_begin:
            self._raw.append(mark)
            self._state = self._header
        return pos

    def _header(self, text: str, pos: int, final: bool) -> int:
        end, header, _ = self._name(self._header_end, (text, pos, final))
        if header is None:
            return pos
        self._raw.append(text[pos:end])
        if self._open(*self.name_of(header)):
            self._expect_arguments()
        return end

    @staticmethod
    def name_of(header: str) -> tuple[str, str | None]:
        """The tool's name and the call's id in a header."""
        return header.strip(), None

    def _behind_arguments(self) -> None:
        self._state = self._tail

    def _tail(self, text: str, pos: int, final: bool) -> int:
        """Blanks and the end of a code block."""
        match = _TAIL.match(text, pos)
        end = match.end() if match else pos
        if end < len(text):
            self._state = self._text
        return end


class DeepSeekV3(HeaderCalls):
    """function<sep>NAME, then the arguments in a code block."""

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call_begin = "<｜tool▁call▁begin｜>"
    separator = "```json"
    call_end = "<｜tool▁call▁end｜>"
    starts = (section[0], call_begin)
    markers = (*section, call_begin, "<｜tool▁sep｜>", call_end)

    @staticmethod
    def name_of(header: str) -> tuple[str, str | None]:
        return header.rpartition("<｜tool▁sep｜>")[2].strip(), None


class DeepSeekV31(HeaderCalls):
    """NAME<sep>arguments"""

    section = DeepSeekV3.section
    call_begin = DeepSeekV3.call_begin
    separator = "<｜tool▁sep｜>"
    call_end = DeepSeekV3.call_end
    starts = DeepSeekV3.starts
    markers = DeepSeekV3.markers


class KimiK2(HeaderCalls):
    """functions.NAME:IDX<arguments begin>arguments; the header is the call's id."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call_begin = "<|tool_call_begin|>"
    separator = "<|tool_call_argument_begin|>"
    call_end = "<|tool_call_end|>"
    starts = (section[0], call_begin)
    markers = (*section, call_begin, separator, call_end)

    @staticmethod
    def name_of(header: str) -> tuple[str, str | None]:
        found = re.fullmatch(r"(?:functions\.)?(.+?)(?::\d+)?", header.strip())
        return (found.group(1), header.strip()) if found else ("", None)
