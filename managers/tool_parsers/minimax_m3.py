"""The format of MiniMax M3: arguments are elements named after them, objects and arrays hold elements, a mark precedes each tag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .events import Tools
from .json_text import dumps, items_of, property_of, skip_blanks
from .scan import Marks
from .typed_value import TypedValue
from .xml_calls import MAX_KEY, XmlCalls

NAMESPACE = "]<]minimax[>["
ITEM = "item"  # name of an array's elements


@dataclass(slots=True)
class _Element:
    """One that is open. closer: of the JSON value that it has become, "" while nothing is known of it."""

    name: str
    schema: Any
    closer: str = ""
    num_children: int = 0


class MiniMaxM3(XmlCalls):
    """NS<tool_call>NS<invoke name="NAME">NS<key>text NS</key>NS<list>NS<item>1 NS</item>NS</list>NS</invoke>NS</tool_call>

    NS is the mark, and there are no blanks behind values. A value without elements holds whatever is not its own end tag.
    """

    wrapper = (NAMESPACE + "<tool_call>", NAMESPACE + "</tool_call>")
    call_open, name_close = NAMESPACE + "<invoke name=", ">"
    key_close, value_close = ">", NAMESPACE
    call_close = NAMESPACE + "</invoke>"
    guess = True
    starts = (wrapper[0], call_open)
    markers = (NAMESPACE, "<tool_call>", "</tool_call>")

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._namespace = Marks(NAMESPACE)
        self._open_elements: list[_Element] = []
        self._before: list[str] = []  # blanks at the beginning of a value

    def _go_on(self, mark: str | None) -> None:
        """Behind the call's name."""
        self._open_elements = [_Element("", self._parameters, "}")]
        if mark == self.call_close:
            self._end_call()
        else:
            self._state = self._body

    def _end_call(self) -> None:
        self._argue("".join(each.closer for each in reversed(self._open_elements)))
        self._state = self._text

    def _end(self) -> None:
        if self._state == self._body:  # every value is whole, only ends are missing
            self._end_call()

    def _body(self, text: str, pos: int, final: bool) -> int:
        """Between elements. What stands there is nothing."""
        pos, mark = self._until(self._namespace, lambda _: None, (text, pos, final))
        if mark is not None:
            self._state = self._tag
        return pos

    def _tag(self, text: str, pos: int, final: bool) -> int:
        end, tag = self._read_tag(text, pos, final)
        if tag is None:
            return end
        self._state = self._body
        if tag in ("</invoke", "</tool_call"):
            self._end_call()
        elif tag.startswith("</"):
            self._leave()
        elif tag.startswith("<"):
            self._enter(tag[1:])
        return end

    def _read_tag(self, text: str, pos: int, final: bool) -> tuple[int, str | None]:
        """(position behind it, "<name" or "</name"); "": there is none; None while it may still come."""
        if text[pos] != "<":
            return pos, ""
        match = self._key_ends.find(text, pos, pos + MAX_KEY)
        if match is not None:
            return match.end(), text[pos : match.start()]
        if final or len(text) - pos >= MAX_KEY:
            self._state = self._body
            return len(text) if final else pos, None
        return pos, None

    def _leave(self) -> None:
        """The innermost element has ended, unless that is the call."""
        if len(self._open_elements) > 1:
            self._argue(self._open_elements.pop().closer)

    def _enter(self, name: str) -> None:
        outer = self._open_elements[-1]
        comma = ", " if outer.num_children else ""
        outer.num_children += 1
        if outer.closer == "]":
            self._argue(comma)
            schema = items_of(outer.schema, self._parameters)
        else:
            self._argue(f"{comma}{dumps(name)}: ")
            schema = property_of(outer.schema, self._parameters, name)
        self._open_elements.append(_Element(name, schema))
        self._typed = TypedValue(schema, self._parameters, guess=self.guess)
        self._before = []
        self._state = self._content

    def _content(self, text: str, pos: int, final: bool) -> int:
        """Behind a start tag: an element, or a value."""
        start = skip_blanks(text, pos)
        self._before.append(text[pos:start])
        if start == len(text):
            return start
        mark = self._namespace.at(text, start)
        if mark is not None:
            self._state = self._first_tag
            return start + len(mark)
        if final or not self._namespace.may_begin(text, start):
            self._begin_value()
        return start

    def _first_tag(self, text: str, pos: int, final: bool) -> int:
        end, tag = self._read_tag(text, pos, final)
        if tag is None:
            return end
        if not tag:
            self._before.append(NAMESPACE)
            self._begin_value()
        elif tag.startswith("</"):
            self._begin_value()
            self._end_value(empty=True)
            if tag in ("</invoke", "</tool_call"):
                self._end_call()
        else:
            self._begin_container(tag[1:])
            self._enter(tag[1:])
        return end

    def _begin_container(self, first: str) -> None:
        """The innermost element holds elements, the first of this name."""
        kinds = self._typed.types & {"array", "object"}
        is_array = kinds == {"array"} if len(kinds) == 1 else first == ITEM
        self._open_elements[-1].closer = "]" if is_array else "}"
        self._argue("[" if is_array else "{")

    def _begin_value(self) -> None:
        """The innermost element holds no elements."""
        self._value_ends = Marks(f"{NAMESPACE}</{self._open_elements[-1].name}>")
        self._argue('"' if self._typed.streams else "")
        self._put("".join(self._before))
        self._state = self._value

    def _value(self, text: str, pos: int, final: bool) -> int:
        pos, mark = self._until(self._value_ends, self._put, (text, pos, False))
        if final and mark is None:  # cut off within its end tag
            return len(text)
        if mark is not None:
            self._end_value()
        return pos

    def _end_value(self, *, empty: bool = False) -> None:
        if empty and self._typed.types & {"array", "object"}:
            self._argue("[]" if "array" in self._typed.types else "{}")
        else:
            self._argue('"' if self._typed.streams else self._typed.json())
        self._open_elements.pop()
        self._state = self._body
