"""Text from outside that cannot become control tokens.

A chat template puts the texts of messages between control tokens, and the encoder reads a control token wherever its spelling
stands. So before rendering each such spelling in a message gets a mark inside; after rendering the prompt is encoded in pieces that
end at the marks, where no spelling is whole any more. The marks are gone then, and the tokens' text is the text that was given.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .reasoning.marks import REASONING_MARKS

MARK = f"\ufdd0{secrets.token_hex(6)}\ufdd1"  # of this process, unknown outside


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class PlainText:
    """Marks the spellings of some tokens, and encodes marked text."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """tokens: the texts of all control tokens."""
        self._sizes: dict[str, set[int]] = {}
        self._tokens = frozenset(token for token in tokens if token)
        for token in self._tokens:
            self._sizes.setdefault(token[0], set()).add(len(token))
        firsts = "".join(map(re.escape, sorted(self._sizes)))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def marked(self, text: str) -> str:
        """The text with a mark behind the first character of each control token in it."""
        if self._first is None:
            return text
        pieces: list[str] = []
        begin = 0
        for match in self._first.finditer(text):
            start = match.start()
            if any(text[start : start + size] in self._tokens for size in self._sizes[match.group()]):
                pieces.append(text[begin : start + 1])
                begin = start + 1
        return MARK.join([*pieces, text[begin:]]) if pieces else text


@functools.lru_cache(maxsize=4)
def marker_of(tokenizer: Any) -> MessageMarker:
    """For the control tokens of a Tokenizer, BOS and EOS among them."""
    special = [tokenizer.tokens[id] for id in getattr(tokenizer, "special_ids", ())]
    return MessageMarker([token for token in (*special, tokenizer.bos_token, tokenizer.eos_token) if token])


class MessageMarker:
    """Marks whole messages. Marks of thinking stay what they are in an assistant's messages: templates look for them there."""

    def __init__(self, tokens: Sequence[str]) -> None:
        thinking = {mark for marks in REASONING_MARKS.values() for mark in (marks.start, marks.end)}
        self._outside = PlainText(tokens)
        self._assistant = PlainText([token for token in tokens if token not in thinking])

    def marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message, or a tool, with all strings in it marked, names in objects too, but its role."""
        change = (self._assistant if message.get("role") == "assistant" else self._outside).marked
        return {key: value if key == "role" else _mapped(value, change) for key, value in message.items()}


def encode_marked(tokenizer: Encoder, text: str) -> list[int]:
    """The ids of rendered text, without BOS; what was marked is text."""
    ids: list[int] = []
    blank: list[int] | None = None
    for index, piece in enumerate(text.split(MARK)):
        if index and blank is None:
            blank = _blank_before(tokenizer)
        if index and blank:
            ids += tokenizer.encode("\n" + piece, add_special_tokens=False)[len(blank) :]
        else:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


def _blank_before(tokenizer: Encoder) -> list[int]:
    """The ids of a newline, if a piece within a text is encoded differently from one at its beginning; else nothing."""
    blank, apart, whole = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "a", "\na"))
    return [] if blank + apart == whole else blank


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return value
