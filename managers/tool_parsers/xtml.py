"""The format of Kimi K3: blocks between tags that control tokens make up, for thinking, answer and calls."""

from __future__ import annotations

import re

from .events import Reasoning, Tools
from .json_text import property_of
from .scan import Marks
from .typed_calls import TypedCalls

OPEN, CLOSE, SEPARATOR, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MAX_TAG = 1024  # characters of an argument's tag
_MARKS = Marks(OPEN, CLOSE, END_OF_MESSAGE)
_SEPARATOR = Marks(SEPARATOR)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _attributes(header: str) -> dict[str, str]:
    found = _ATTRIBUTE.findall(header)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found}


class KimiK3(TypedCalls):
    """Blocks think, response and tools; in the last one, of each call, without the line breaks:

    <|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="string"<|sep|>text<|close|>argument<|sep|>
    <|close|>call<|sep|>

    The prompt has opened the first block. A tag that makes no sense where it stands is text. The id of a call is NAME:index.
    """

    starts = (f"{OPEN}tools{SEPARATOR}",)
    markers = (OPEN, CLOSE, SEPARATOR, END_OF_MESSAGE)
    guess = True

    def __init__(self, tools: Tools | None = None, *, calls: bool = True, reasoning: bool = True, inside: bool = False) -> None:
        """calls, reasoning: tell these as what they are; else as text. inside: the thinking is open."""
        super().__init__(tools, f"{CLOSE}argument{SEPARATOR}")
        self._calls = calls
        self._reasoning = reasoning
        self._block = "think" if inside and reasoning else "response"
        self._thoughts: list[str] = []  # blanks that were not told: the thinking may end
        self._thought = False

    # --- blocks -------------------------------------------------------------------------------------------------------------------

    def _text(self, text: str, pos: int, final: bool) -> int:
        sink = self._think if self._block == "think" else self._say
        pos, mark = self._until(_MARKS, sink, (text, pos, final))
        if mark in (OPEN, CLOSE):
            self._raw.append(mark)
            self._state = self._tag
        return pos

    def _tag(self, text: str, pos: int, final: bool) -> int:
        end, header, _ = self._name(_SEPARATOR, (text, pos, final))
        if header is None:
            return pos
        closes = self._raw[0] == CLOSE
        self._raw.append(text[pos:end])
        self._state = self._text
        name = header.split(maxsplit=1)[0] if header.strip() else ""
        if closes:
            self._end_block(name)
        elif name == "call" and self._calls and self._block != "think":
            self._begin_call(_attributes(header))
        else:
            self._begin_block(name)
        return end

    def _begin_block(self, name: str) -> None:
        known = {"response": True, "message": True, "think": self._reasoning, "tools": self._calls}
        if not known.get(name):
            self._refuse()
            return
        if name == "response" and self._spoken:  # two of them are two lines
            self._blanks = ["\n"]
        elif name == "think" and not self._spoken:
            self._blanks = []
        self._raw = []
        self._block = name

    def _end_block(self, name: str) -> None:
        if name not in (self._block, "message") and not (name == "tools" and self.num_calls):
            self._refuse()
            return
        self._raw = []
        if name == "think":
            self._behind_call = True  # blanks behind it go
        self._block = ""

    def _think(self, text: str) -> None:
        """Blanks at the beginning and at the end of the thinking are dropped."""
        solid = text.rstrip()
        if solid:
            self._events.append(Reasoning("".join(self._thoughts) + solid if self._thought else solid.lstrip()))
            self._thought = True
            self._thoughts = []
        if len(solid) < len(text):
            self._thoughts.append(text[len(solid) :])

    # --- calls --------------------------------------------------------------------------------------------------------------------

    def _begin_call(self, attributes: dict[str, str]) -> None:
        name, index = attributes.get("tool", ""), attributes.get("index")
        if not self._open(name, None if index is None else f"{name}:{index}"):
            return
        self._begin_arguments((self._tools or {}).get(name, {}))
        self._state = self._body

    def _body(self, text: str, pos: int, final: bool) -> int:
        """Between arguments. What stands there is nothing."""
        pos, mark = self._until(_MARKS, lambda _: None, (text, pos, final))
        if mark == END_OF_MESSAGE:
            self._end_arguments()
        elif mark is not None:
            self._state = self._argument_tag if mark == OPEN else self._end_tag
        return pos

    def _end_tag(self, text: str, pos: int, final: bool) -> int:
        end, name = self._read_tag(text, pos, final)
        if name is not None and name.strip() in ("call", "tools", "message"):
            self._end_arguments()
            self._block = self._block if name.strip() == "call" else ""
        return end

    def _read_tag(self, text: str, pos: int, final: bool) -> tuple[int, str | None]:
        """(position behind it, its inside), or None while it may still come. It may turn out to be none, too."""
        match = _SEPARATOR.find(text, pos, pos + MAX_TAG)
        if match is not None or final or len(text) - pos >= MAX_TAG:
            self._state = self._body
        if match is not None:
            return match.end(), text[pos : match.start()]
        return len(text) if final else pos, None

    def _argument_tag(self, text: str, pos: int, final: bool) -> int:
        end, header = self._read_tag(text, pos, final)
        attributes = _attributes(header or "")
        if header is None or not header.startswith("argument") or "key" not in attributes:
            return end
        key = attributes["key"]
        kind = attributes.get("type", "")
        schema = property_of(self._parameters, self._parameters, key) if kind in ("", "string") else None
        self._begin_argument(key, schema, is_string=kind == "string")
        self._state = self._value
        return end
