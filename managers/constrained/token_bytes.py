"""Which bytes each token stands for, where a tokenizer's decoder is so simple that text is the concatenation of its tokens' bytes.

That holds for byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and for SentencePiece BPE with byte fallback (Llama 2, Mistral, Gemma).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest is moved behind U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


CHAR_OF_BYTE: Final = _byte_alphabet()
BYTE_OF_CHAR: Final = {char: byte for byte, char in CHAR_OF_BYTE.items()}

REPLACE_EACH_BYTE: Final = "banyan.replace_each_byte"  # codec error handler: one U+FFFD for each invalid byte


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Text of ids = UTF-8 decoding, with the error handler ``errors``, of the concatenated ``tokens``, less one leading space with
    ``strip_space``. ``visible`` is ``tokens`` with the special ones empty.
    """

    tokens: list[bytes]
    visible: list[bytes]
    errors: str
    strip_space: bool


def byte_table(tokens: Sequence[str | None], special_ids: frozenset[int], decoder: Any) -> ByteTable | None:
    """The table for a tokenizer with these tokens (by id, None where there is none), or None if the decoder is of another kind.

    decoder: what a tokenizer.json holds under "decoder".
    """
    steps = decoder.get("decoders", []) if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    if [_kind(step) for step in steps] == ["ByteLevel"]:
        spelled, errors, strip = [_byte_level(token or "") for token in tokens], "replace", False
    else:
        plan = _sentencepiece_plan(steps)
        if plan is None:
            return None
        replacements, byte_fallback, strip = plan
        errors = REPLACE_EACH_BYTE
        spelled = [_sentencepiece(token or "", replacements, byte_fallback=byte_fallback) for token in tokens]
    visible = [b"" if id in special_ids else data for id, data in enumerate(spelled)]
    return ByteTable(tokens=spelled, visible=visible, errors=errors, strip_space=strip)


def _kind(step: Any) -> str:
    return str(step.get("type")) if isinstance(step, dict) else ""


def _byte_level(token: str) -> bytes:
    """A token with a character outside the byte alphabet (an added token) stands for itself."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str, replacements: list[tuple[str, str]], *, byte_fallback: bool) -> bytes:
    for old, new in replacements:
        token = token.replace(old, new)
    if byte_fallback and len(token) == 6 and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.encode()


def _sentencepiece_plan(steps: list[Any]) -> tuple[list[tuple[str, str]], bool, bool] | None:
    """(replacements, byte fallback, strip) if the steps are Replace*, ByteFallback?, Fuse and maybe a Strip of one space."""
    kinds = [_kind(step) for step in steps]
    num_replace = next((rank for rank, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    tail = kinds[num_replace:]
    byte_fallback = tail[:1] == ["ByteFallback"]
    if tail[int(byte_fallback) :] not in (["Fuse"], ["Fuse", "Strip"]):
        return None
    replacements = []
    for step in steps[:num_replace]:
        old = step.get("pattern", {}).get("String")
        if not old:
            return None
        replacements.append((old, step.get("content", "")))
    strip = kinds[-1] == "Strip"
    if strip and (steps[-1].get("content"), steps[-1].get("start"), steps[-1].get("stop")) != (" ", 1, 0):
        return None
    return replacements, byte_fallback, strip
