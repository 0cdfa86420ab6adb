"""Jump-forward: the tokens of text that a grammar forces, so that they need not be sampled one forward pass each.

The forced text is tokenised behind the tokens that are there already, and only what no continuation can change is kept: its last
run of letters, digits, blanks or signs may be the beginning of a longer token. So what a jump appends is what the model's
tokenizer makes of the text. Where a token would reach across the place at which the forced text begins, nothing is appended: the
model samples a token, and the next look may find a jump.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .grammar import Matcher

MIN_TOKENS = 2  # one token is sampled as fast as it is appended
NUM_CONTEXT = 12  # tokens before the forced text that are tokenised with it


class JumpForward:
    """encode: a text's ids without special tokens; token_bytes: the bytes of each id."""

    def __init__(self, encode: Callable[[str], list[int]], token_bytes: Sequence[bytes]) -> None:
        self._encode = encode
        self._bytes = token_bytes

    def tokens(self, matcher: Matcher, context: Sequence[int]) -> list[int]:
        """What must come next behind ``context``, at least MIN_TOKENS ids or none. The matcher is left as it was."""
        forced = matcher.forced_text()
        stable = forced[: stable_length(forced)]
        if len(stable) < MIN_TOKENS:
            return []
        before = _text(b"".join([self._bytes[token_id] for token_id in context[-NUM_CONTEXT:]]))
        if before is None:
            return []
        ids = self._cut(self._encode(before + forced), len(forced.encode()), len(stable.encode()))
        ids = self._accepted(matcher, ids)
        return ids if len(ids) >= MIN_TOKENS else []

    def _cut(self, ids: list[int], num_forced: int, num_stable: int) -> list[int]:
        """Of the tokens that make up the last num_forced bytes those that end within their first num_stable ones."""
        begin, size = len(ids), 0
        while begin and size < num_forced:
            begin -= 1
            size += len(self._bytes[ids[begin]])
        if size != num_forced:
            return []
        end, size = begin, 0
        while end < len(ids) and size + len(self._bytes[ids[end]]) <= num_stable:
            size += len(self._bytes[ids[end]])
            end += 1
        return ids[begin:end]

    @staticmethod
    def _accepted(matcher: Matcher, ids: list[int]) -> list[int]:
        """As many of the ids as the grammar takes: a tokenizer that changes text makes others of it."""
        count = 0
        while count < len(ids) and matcher.accept(ids[count]):
            count += 1
        if count:
            matcher.rollback(count)
        return ids[:count]


def stable_length(text: str) -> int:
    """Characters whose tokens no continuation changes, for tokenizers that split text before they merge bytes: all but the last run
    of one kind, and the one sign or blank that may belong to it."""
    end = len(text)
    if not end:
        return 0
    kind = _kind(text[-1])
    while end and _kind(text[end - 1]) == kind:
        end -= 1
    joins = end and kind != "blank" and (text[end - 1] == " " or (kind == "letter" and _kind(text[end - 1]) == "sign"))
    return end - 1 if joins else end


def _kind(char: str) -> str:
    if char.isspace():
        return "blank"
    if char.isalpha():
        return "letter"
    return "digit" if char.isnumeric() else "sign"


def _text(data: bytes) -> str | None:
    """The text at the end of bytes, from behind what is no UTF-8; None if they end inside a character."""
    text = data.decode("utf-8", "replace")
    return None if text.endswith("\ufffd") else text.rpartition("\ufffd")[2]
