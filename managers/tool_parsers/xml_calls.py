"""Formats in which each argument has an element of its own: qwen3_coder, glm45 and their like.

A string is streamed as it comes, unless its schema says more of it; another value is told when it is whole, because only then is it
known to be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .events import Tools
from .json_text import skip_blanks
from .scan import Marks
from .typed_calls import TypedCalls

MAX_KEY = 1024  # characters of an argument's name


class XmlCalls(TypedCalls):
    """call_open NAME name_close, then per argument param_open KEY key_close [value_open] VALUE value_close, then call_close."""

    wrapper: ClassVar[tuple[str, str] | None] = None  # around a call or several
    call_open: ClassVar[str] = ""
    name_close: ClassVar[str] = ""
    param_open: ClassVar[str] = ""
    key_close: ClassVar[str] = ""
    value_open: ClassVar[str] = ""
    value_close: ClassVar[str] = ""
    call_close: ClassVar[str] = ""
    own_lines: ClassVar[bool] = False  # a newline behind key_close and one before value_close are no part of the value

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools, self.value_close)
        wrapper = self.wrapper or ("", "")
        self._outside = Marks(*wrapper, self.call_open)
        self._call_open = Marks(self.call_open)
        self._name_ends = Marks(self.name_close, self.param_open, self.call_close)
        self._inside = Marks(self.param_open, self.call_close)
        self._key_ends = Marks(self.key_close)
        self._value_opens = Marks(self.value_open) if self.value_open else None
        self._properties: Mapping[str, Any] = {}
        self._newline = ""  # held back: value_close may follow

    def _text(self, text: str, pos: int, final: bool) -> int:
        pos, mark = self._until(self._outside, self._say, (text, pos, final))
        if mark is None:
            return pos
        if mark == self.call_open:
            self._raw.append(mark)
            self._state = self._call_name
        elif mark == (self.wrapper or ("", ""))[0]:
            self._raw.append(mark)
            self._state = self._wrapped
        elif not self.num_calls:
            self._say(mark)
        return pos

    def _wrapped(self, text: str, pos: int, final: bool) -> int:
        """Behind the wrapper's begin only a call makes sense."""
        end = skip_blanks(text, pos)
        if end == len(text):
            self._raw.append(text[pos:])
            return end
        mark = self._call_open.at(text, end)
        if mark is None:
            if final or not self._call_open.may_begin(text, end):
                self._refuse()
            return pos
        self._raw.append(text[pos : end + len(mark)])
        self._state = self._call_name
        return end + len(mark)

    def _call_name(self, text: str, pos: int, final: bool) -> int:
        end, name, mark = self._name(self._name_ends, (text, pos, final))
        if name is None:
            return pos
        if not name.strip() and not mark.strip():  # the name stands on a line of its own
            self._raw.append(text[pos:end])
            return end
        self._raw.append(text[pos:end])
        name = name.strip().strip('"')
        if not self._open(name):
            return end
        schema = (self._tools or {}).get(name, {})
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._begin_arguments(schema)
        self._go_on(mark)
        return end

    def _go_on(self, mark: str | None) -> None:
        """Behind a mark inside a call."""
        if mark == self.param_open:
            self._state = self._key
        elif mark == self.call_close:
            self._end_arguments()
        else:
            self._state = self._body

    def _body(self, text: str, pos: int, final: bool) -> int:
        """Between arguments. What stands there is nothing."""
        pos, mark = self._until(self._inside, lambda _: None, (text, pos, final))
        if mark is not None:
            self._go_on(mark)
        return pos

    def _key(self, text: str, pos: int, final: bool) -> int:
        match = self._key_ends.find(text, pos, pos + MAX_KEY)
        if match is None:
            return pos if len(text) - pos < MAX_KEY and not final else self._skip_key(len(text))
        key, is_string = self.key_of(text[pos : match.start()])
        self._begin_argument(key, self._properties.get(key), is_string=is_string)
        self._newline = ""
        self._state = self._value_start
        return match.end()

    def _skip_key(self, end: int) -> int:
        self._state = self._body
        return end

    @staticmethod
    def key_of(text: str) -> tuple[str, bool]:
        """The argument's name, and whether the format itself says that it is a string."""
        return text.strip().strip('"'), False

    def _value_start(self, text: str, pos: int, final: bool) -> int:
        """Blanks and value_open, or the newline that a value does not begin with."""
        if self._value_opens is not None:
            end = skip_blanks(text, pos)
            mark = self._value_opens.at(text, end)
            if mark is None and self._value_opens.may_begin(text, end):
                return len(text) if final else end
            end += len(mark or "")
        else:
            end = pos + (self.own_lines and text.startswith("\n", pos))
        self._state = self._value
        return end

    def _put(self, text: str) -> None:
        if self.own_lines and text:
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text[: len(text) - len(self._newline)]
        super()._put(text)


class Qwen3Coder(XmlCalls):
    """<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>"""

    wrapper = ("<tool_call>", "</tool_call>")
    call_open, name_close = "<function=", ">"
    param_open, key_close, value_close = "<parameter=", ">", "</parameter>"
    call_close = "</function>"
    own_lines = True
    starts = (wrapper[0], call_open)
    markers = wrapper


class Glm45(XmlCalls):
    """<tool_call>NAME<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, with newlines or without"""

    call_open, name_close = "<tool_call>", "\n"
    param_open, key_close = "<arg_key>", "</arg_key>"
    value_open, value_close = "<arg_value>", "</arg_value>"
    call_close = "</tool_call>"
    guess = True
    starts = (call_open,)
    markers = (call_open, call_close, param_open, key_close, value_open, value_close)


class MiniMaxM2(XmlCalls):
    """<minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>"""

    wrapper = ("<minimax:tool_call>", "</minimax:tool_call>")
    call_open, name_close = "<invoke name=", ">"
    param_open, key_close, value_close = "<parameter name=", ">", "</parameter>"
    call_close = "</invoke>"
    own_lines = True
    starts = (wrapper[0], call_open)
    markers = wrapper


class MiniCpm5(XmlCalls):
    """<function name="NAME"><param name="KEY">value</param></function>"""

    call_open, name_close = "<function name=", ">"
    param_open, key_close, value_close = "<param name=", ">", "</param>"
    call_close = "</function>"
    starts = (call_open,)


class Hunyuan(XmlCalls):
    """<tool_calls><tool_call>NAME<tool_sep><arg_key>key</arg_key><arg_value>value</arg_value></tool_call></tool_calls>"""

    wrapper = ("<tool_calls>", "</tool_calls>")
    call_open, name_close = "<tool_call>", "<tool_sep>"
    param_open, key_close = "<arg_key>", "</arg_key>"
    value_open, value_close = "<arg_value>", "</arg_value>"
    call_close = "</tool_call>"
    guess = True
    starts = (wrapper[0], call_open)
    markers = (*wrapper, call_open, name_close, param_open, key_close, value_open, value_close, call_close)


class DeepSeekV32(XmlCalls):
    """<｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">value</...>"""

    wrapper = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call_open, name_close = "<｜DSML｜invoke name=", ">"
    param_open, key_close, value_close = "<｜DSML｜parameter name=", ">", "</｜DSML｜parameter>"
    call_close = "</｜DSML｜invoke>"
    guess = True
    starts = (wrapper[0], call_open)
    markers = (*wrapper, "｜DSML｜")

    @staticmethod
    def key_of(text: str) -> tuple[str, bool]:
        name, _, kind = text.strip().partition('" string="')
        return name.strip().strip('"'), kind.startswith("true")


class DeepSeekV4(DeepSeekV32):
    """The same within <｜DSML｜tool_calls>."""

    wrapper = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    starts = (wrapper[0], DeepSeekV32.call_open)
    markers = (*wrapper, "｜DSML｜")


class Step3(XmlCalls):
    """<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME"><steptml:parameter name="KEY">value</...>"""

    wrapper = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")
    call_open, name_close = "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=", ">"
    param_open, key_close, value_close = "<steptml:parameter name=", ">", "</steptml:parameter>"
    call_close = "</steptml:invoke><｜tool_call_end｜>"
    starts = (wrapper[0], call_open)
    markers = (*wrapper, "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
