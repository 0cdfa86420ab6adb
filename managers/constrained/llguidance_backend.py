"""Grammars by llguidance: an Earley parser over derivatives of regular expressions; masks are computed when they are needed.

It compiles in milliseconds and cannot be written to bytes, so "compiled" is the text, tried out, and loading compiles it again
under the library's own limits.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..errors import RequestError
from .grammar import EBNF, JSON_SCHEMA, REGEX, CompiledGrammar, Matcher, Vocabulary, mask_width

# Escapes as \uXXXX are left out: a key spelled with them is another string to the grammar, but the same to a JSON reader.
JSON_OPTIONS: Any = {
    "json_allowed_escapes": '"\\bfnrt',
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
STEP_ITEMS = 50_000  # parser items per mask: about 3 ms


class LLGuidanceBackend:
    """Implements GrammarBackend."""

    kinds = (JSON_SCHEMA, REGEX, EBNF)

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Words(vocabulary)), n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.stop_ids)
        )
        self._limits = llguidance.LLParserLimits(step_max_items=STEP_ITEMS, verbose_errors=False)

    def compile(self, kind: str, text: str) -> bytes:
        library = self._library.LLMatcher
        try:
            if kind == JSON_SCHEMA:
                grammar = library.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            elif kind == REGEX:
                grammar = library.grammar_from_regex(text)
            else:
                grammar = library.grammar_from_lark(text)
        except ValueError as error:
            raise RequestError(f"{kind}: {error}", param=kind) from None
        failed, messages = library.validate_grammar_with_warnings(grammar, self._tokenizer, limits=self._limits)
        if failed or messages:  # a warning means that something is not enforced
            raise RequestError(f"{kind}: {messages[0].strip().splitlines()[0]}", param=kind)
        data = json.dumps(grammar).encode()
        row = np.zeros(mask_width(self._tokenizer.vocab_size), np.int32)
        self.load(data).matcher().fill_mask(row)
        return data

    def load(self, data: bytes) -> CompiledGrammar:
        matcher = self._library.LLMatcher(self._tokenizer, json.loads(data), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestError(f"The grammar cannot be loaded: {matcher.get_error().splitlines()[0]}")
        return _Compiled(matcher)


class _Words:
    """The shape of a tokenizer that the library asks for. It would encode text only to forecast tokens, which is not used."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        stops = set(vocabulary.stop_ids)
        hidden = [index for index, token in enumerate(vocabulary.tokens) if not token]
        self.tokens = [token or (b"<stop %d>" % i if i in stops else b"<none %d>" % i) for i, token in enumerate(vocabulary.tokens)]
        self.special_token_ids = hidden
        self.eos_token_id = vocabulary.stop_ids[0] if vocabulary.stop_ids else 0
        self.bos_token_id = None
        self._ids = {token: index for index, token in enumerate(vocabulary.tokens) if token}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self._ids[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._ids]


class _Compiled:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def matcher(self) -> Matcher:
        return _Matcher(self._matcher.deep_copy())


class _Matcher:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def is_terminated(self) -> bool:
        return bool(self._handle.is_stopped() and not self._handle.is_error())

    def fill_mask(self, row: np.ndarray) -> None:
        if not (row.flags.c_contiguous and row.dtype == np.int32):
            raise ValueError("a mask is a contiguous int32 array")
        row[:] = 0
        if not self._handle.is_error():
            self._handle.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._handle.is_error():  # a limit was hit: nothing is allowed any more
            row[:] = 0

    def accept(self, token_id: int) -> bool:
        return bool(self._handle.consume_token(token_id))

    def rollback(self, count: int) -> None:
        if not self._handle.rollback(count):
            raise ValueError(f"cannot roll back {count} tokens")

    def forced_text(self) -> str:
        return bytes(self._handle.compute_ff_bytes()).decode("utf-8", "ignore")

    def fork(self) -> Matcher:
        return _Matcher(self._handle.deep_copy())
