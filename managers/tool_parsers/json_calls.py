"""Formats in which a call is a JSON object with a name and arguments: hermes, llama3, mistral, plain JSON."""

from __future__ import annotations

import re
from typing import ClassVar

from .events import Tools
from .json_text import JsonValue, loads, skip_blanks
from .scan import CallParser, Marks

NAME_KEYS = frozenset(["name", "tool_name"])
ARGUMENT_KEYS = frozenset(["arguments", "parameters"])
OTHER_KEYS = frozenset(["type", "id", "function"])
_BETWEEN = re.compile(r"[\s,;]*")


class ArgumentsParser(CallParser):
    """With a state for arguments that are one JSON value. A string is taken for JSON text within."""

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._value = JsonValue()
        self._parts: list[str] = []  # of a string, or of arguments whose call has no name yet

    def _expect_arguments(self) -> None:
        self._value = JsonValue()
        self._parts = []
        self._state = self._arguments

    def _arguments(self, text: str, pos: int, final: bool) -> int:
        end = self._value.take(text, pos)
        piece = self._value.pieces()
        if self._value.kind in ("{", "["):
            self._argue(piece)
        else:
            self._parts.append(piece)
        if self._value.done:
            self._flush_arguments()
        return end

    def _flush_arguments(self) -> None:
        self._argue(arguments_of("".join(self._parts)) if self._parts else "")
        self._parts = []
        self._behind_arguments()

    def _end(self) -> None:
        self._value.end()
        if self._state == self._arguments and self._value.done:
            self._flush_arguments()

    def _behind_arguments(self) -> None:
        """The arguments have ended: go to another state."""
        raise NotImplementedError


def arguments_of(value: str) -> str:
    """Arguments that are no object: a string with JSON in it, null for none."""
    try:
        found = loads(value)
    except ValueError:
        return value
    if isinstance(found, str):
        return found.strip() or "{}"
    return "{}" if found is None else value


class JsonCalls(ArgumentsParser):
    """Objects between a begin and an end mark, one or several, in an array or not."""

    begin: ClassVar[tuple[str, ...]] = ()
    end: ClassVar[str] = ""
    bare: ClassVar[str] = ""  # characters with which an answer may begin that is nothing but calls
    names_behind_begin: ClassVar[bool] = False  # also name[ARGS]{...}

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._begins = Marks(*self.begin, self.end) if self.begin else None
        self._end_marks = Marks(self.end) if self.end else None
        self._name_marks = Marks("[ARGS]", "[CALL_ID]", "{")
        self._depth = 0  # of arrays around the objects
        self._nested = 0  # of objects around name and arguments
        self._key = ""
        self._found_name: str | None = None
        self._kept_arguments = ""  # JSON of arguments that came before the name, or any text once they were told
        self._called = False  # there was a call since the begin mark
        if self.bare:
            self._state = self._beginning

    # --- outside ------------------------------------------------------------------------------------------------------------------

    def _beginning(self, text: str, pos: int, final: bool) -> int:
        """Nothing but blanks so far."""
        end = skip_blanks(text, pos)
        self._raw.append(text[pos:end])
        if end < len(text):
            if text[end] in self.bare:
                self._start()
            else:
                self._refuse()
        return end

    def _text(self, text: str, pos: int, final: bool) -> int:
        if self._begins is None:
            self._say(text[pos:])
            return len(text)
        pos, mark = self._until(self._begins, self._say, (text, pos, final))
        if mark == self.end and mark and not self._called:
            self._say(mark)
        elif mark in self.begin:
            self._raw.append(mark)
            self._start()
        return pos

    def _start(self) -> None:
        self._called = False
        self._found_name = None
        self._depth = 0
        self._state = self._between

    def _between(self, text: str, pos: int, final: bool) -> int:
        """Before an object: blanks, commas, brackets, the end mark."""
        match = _BETWEEN.match(text, pos)
        end = match.end() if match else pos
        if not self._called:
            self._raw.append(text[pos:end])
        if end == len(text):
            return end
        if text[end] == "{":
            return self._begin_object(end)
        if text[end] == "[" and not (self._called and not self._depth):
            self._depth += 1
            return self._keep_raw("[", end)
        if text[end] == "]" and self._depth:
            self._depth -= 1
            if not self._depth and self._called:
                self._state = self._closing
                return end + 1
            return self._keep_raw("]", end)
        return self._other(text, end, final)

    def _keep_raw(self, char: str, pos: int) -> int:
        if not self._called:
            self._raw.append(char)
        return pos + 1

    def _other(self, text: str, pos: int, final: bool) -> int:
        if self._called:
            self._state = self._closing
        elif self.names_behind_begin:
            self._state = self._header
        else:
            self._refuse()
        return pos

    def _closing(self, text: str, pos: int, final: bool) -> int:
        """Behind the last object: the end mark, or text."""
        end = skip_blanks(text, pos)
        if end == len(text):
            return end
        if self._end_marks is not None:
            mark = self._end_marks.at(text, end)
            if mark is None and not final and self._end_marks.may_begin(text, end):
                return end
            end += len(mark or "")
        self._state = self._text
        return end

    def _header(self, text: str, pos: int, final: bool) -> int:
        """name[ARGS]{...}, name[CALL_ID]id[ARGS]{...} or name{...}"""
        end, name, mark = self._name(self._name_marks, (text, pos, final))
        if name is None:
            return pos
        self._raw.append(text[pos:end])
        if self._found_name is None:
            self._found_name = name.strip()
        call_id = name.strip() if name.strip() != self._found_name else None
        if mark == "[CALL_ID]":
            return end
        found, self._found_name = self._found_name, None
        if mark == "{":
            self._raw[-1] = text[pos : end - 1]
            end -= 1
        if self._open(found, call_id):
            self._called = True
            self._nested = -1  # no object around the arguments
            self._expect_arguments()
        return end

    # --- an object ----------------------------------------------------------------------------------------------------------------

    def _begin_object(self, pos: int) -> int:
        self._raw.append("{")
        self._nested = 0
        self._found_name = None
        self._parts = []
        self._state = self._before_key
        return pos + 1

    def _before_key(self, text: str, pos: int, final: bool) -> int:
        match = _BETWEEN.match(text, pos)
        end = match.end() if match else pos
        self._note(text[pos:end])
        if end == len(text):
            return end
        if text[end] == '"':
            self._value, self._state = JsonValue(), self._in_key
            return end
        if text[end] == "}":
            self._note("}")
            self._end_object()
            return end + 1
        self._broken()
        return end

    def _in_key(self, text: str, pos: int, final: bool) -> int:
        end = self._value.take(text, pos)
        self._note(text[pos:end])
        self._parts.append(self._value.pieces())
        if self._value.done:
            self._key, self._parts = _string("".join(self._parts)), []
            self._state = self._before_colon
        return end

    def _before_colon(self, text: str, pos: int, final: bool) -> int:
        end = skip_blanks(text, pos)
        self._note(text[pos:end])
        if end == len(text):
            return end
        known = self._key in NAME_KEYS | ARGUMENT_KEYS | OTHER_KEYS
        if text[end] != ":" or (self.bare and not known and self._found_name is None):
            self._broken()
            return end
        self._note(":")
        self._value = JsonValue()
        self._state = self._in_value
        return end + 1

    def _in_value(self, text: str, pos: int, final: bool) -> int:
        if not self._value.kind:
            start = skip_blanks(text, pos)
            if start == len(text):
                self._note(text[pos:])
                return start
            if self._key == "function" and text[start] == "{":
                self._note(text[pos : start + 1])
                self._nested += 1
                self._state = self._before_key
                return start + 1
            if self._key in ARGUMENT_KEYS and self._found_name is not None:
                self._expect_arguments()
                return start
        end = self._value.take(text, pos)
        if final:
            self._value.end()
        self._note(text[pos:end])
        self._parts.append(self._value.pieces())
        if self._value.done:
            self._take_value()
        return end

    def _take_value(self) -> None:
        """A value that is not the arguments of a call that has begun."""
        value, kept = "".join(self._parts), self._key in ARGUMENT_KEYS
        self._parts = []
        self._state = self._before_key
        if kept:
            self._kept_arguments = value
        elif self._key in NAME_KEYS or (self._key == "function" and value.startswith('"')):
            self._name_found(_string(value))

    def _name_found(self, name: str) -> None:
        if self._found_name is not None:
            return
        if self._open(name):
            self._called = True
            self._found_name = name
            self._argue(arguments_of(self._kept_arguments) if self._kept_arguments else "")

    def _behind_arguments(self) -> None:
        self._kept_arguments = "given"
        if self._nested < 0:
            self._end_call()
        else:
            self._state = self._before_key

    def _end_object(self) -> None:
        if self._nested:
            self._nested -= 1
        elif self._found_name is None:
            self._refuse()
        else:
            if not self._kept_arguments:
                self._argue("{}")
            self._end_call()

    def _end_call(self) -> None:
        self._kept_arguments = ""
        self._state = self._between

    def _broken(self) -> None:
        """This is no JSON object. What was told of a call stays told."""
        self._kept_arguments = ""
        if self._found_name is None:
            self._refuse()
        else:
            self._state = self._closing

    def _note(self, text: str) -> None:
        """Remember what was read as long as no name was."""
        if self._found_name is None:
            self._raw.append(text)


def _string(text: str) -> str:
    try:
        value = loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


class Hermes(JsonCalls):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    begin = ("<tool_call>",)
    end = "</tool_call>"
    starts = begin
    markers = (*begin, end)


class Llama3(JsonCalls):
    """<|python_tag|>{"name": ..., "parameters": {...}}; {...}, or the same without the mark if the answer begins with it."""

    begin = ("<|python_tag|>",)
    bare = "{"
    starts = begin
    markers = (*begin, "<|eom_id|>")


class Mistral(JsonCalls):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}"""

    begin = ("[TOOL_CALLS]",)
    names_behind_begin = True
    starts = begin
    markers = (*begin, "[ARGS]", "[CALL_ID]")


class PlainJson(JsonCalls):
    """An answer that is nothing but an array of {"name": ..., "parameters": {...}}, or one such object."""

    bare = "[{"


class InternS1(JsonCalls):
    """<|action_start|> <|plugin|>{"name": ..., "parameters": {...}}<|action_end|>"""

    begin = ("<|action_start|> <|plugin|>",)
    end = "<|action_end|>"
    starts = begin
    markers = ("<|action_start|>", "<|plugin|>", end)


class CohereCommand4(JsonCalls):
    """<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>"""

    begin = ("<|START_ACTION|>",)
    end = "<|END_ACTION|>"
    starts = begin
    markers = (*begin, end)


class GigaChat3(JsonCalls):
    """<|function_call|>{"name": ..., "arguments": {...}}, in older templates behind "function call" """

    begin = ("<|function_call|>", "function call<|role_sep|>")
    starts = begin
    markers = ("<|function_call|>", "<|role_sep|>", "<|message_sep|>")
