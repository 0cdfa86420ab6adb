"""What formats share in which an argument is a text between marks, and its schema says what that text is."""

from __future__ import annotations

from typing import Any, ClassVar

from .events import Tools
from .json_text import dumps, escaped
from .scan import CallParser, Marks
from .typed_value import TypedValue


class TypedCalls(CallParser):
    """A call is ``_begin_arguments``, then for each of them ``_begin_argument`` and the state ``_value``, which leads back to the
    state ``_body``, and in the end ``_end_arguments``."""

    guess: ClassVar[bool] = False  # without a type in the schema, what can be read as JSON is JSON

    def __init__(self, tools: Tools | None, value_end: str) -> None:
        super().__init__(tools)
        self._value_ends = Marks(value_end)
        self._parameters: Any = None  # schema of the call's arguments
        self._num_arguments = 0
        self._typed = TypedValue(guess=self.guess)  # the newest argument

    def _body(self, text: str, pos: int, final: bool) -> int:
        """The state between arguments."""
        raise NotImplementedError

    def _begin_arguments(self, parameters: Any) -> None:
        self._parameters = parameters
        self._num_arguments = 0
        self._argue("{")

    def _begin_argument(self, key: str, schema: Any, *, is_string: bool) -> None:
        self._typed = TypedValue(schema, self._parameters, guess=self.guess, is_string=is_string)
        self._argue((", " if self._num_arguments else "") + dumps(key) + ": " + ('"' if self._typed.streams else ""))
        self._num_arguments += 1

    def _value(self, text: str, pos: int, final: bool) -> int:
        """The state within an argument."""
        pos, mark = self._until(self._value_ends, self._put, (text, pos, False))
        if final and mark is None:  # cut off within its end mark
            return len(text)
        if mark is not None and self._typed.is_amid_string:
            self._put(mark)
        elif mark is not None:
            self._argue('"' if self._typed.streams else self._typed.json())
            self._state = self._body
        return pos

    def _put(self, text: str) -> None:
        if self._typed.streams:
            self._argue(escaped(text))
        else:
            self._typed.put(text)

    def _end_arguments(self) -> None:
        self._argue("}")
        self._state = self._text

    def _end(self) -> None:
        if self._state == self._body:  # every argument is whole, only the call's end is missing
            self._end_arguments()
