"""What a grammar is to the engine: the protocols that every backend implements, and where the backends are found.

A grammar is compiled in a worker process (grammar_worker) into bytes, which the scheduler loads; each request then has a matcher of
its own. A token mask is one row of int32 [ceil(V / 32)]: bit i % 32 of word i // 32 says whether token i may come next.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Protocol

import msgspec
import numpy as np

from ...model_executor.step import ModelInfo
from ..errors import RequestError
from ..tokenizer import Tokenizer

JSON_SCHEMA, REGEX, EBNF, STRUCTURAL_TAG = KINDS = ("json_schema", "regex", "ebnf", "structural_tag")

# name -> (module here, class, package that it needs), in the order in which they are tried; imported only where they are used
BACKENDS: dict[str, tuple[str, str, str]] = {
    "xgrammar": ("xgrammar_backend", "XGrammarBackend", "xgrammar"),
    "llguidance": ("llguidance_backend", "LLGuidanceBackend", "llguidance"),
    "outlines": ("outlines_backend", "OutlinesBackend", "outlines_core"),
}
DEFAULT_BACKEND = "xgrammar"


class GrammarText(msgspec.Struct, frozen=True, array_like=True):
    """A grammar as a client sends it."""

    kind: str
    text: str


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend knows of a tokenizer.

    tokens: the bytes of each id of the model's vocabulary, empty where an id has no text (special or unused). Those are
    never allowed, but for the stop_ids, which are allowed where the grammar is complete.
    """

    tokens: list[bytes]
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, vocab_size: int, stop_ids: tuple[int, ...]) -> Vocabulary:
        """Raises RequestError for a tokenizer whose tokens have no bytes of their own."""
        table = tokenizer.byte_table
        if table is None:
            raise RequestError("Grammars are not supported with this model's tokenizer: its tokens do not stand for bytes.")
        tokens = list(table.visible[:vocab_size])
        tokens += [b""] * (vocab_size - len(tokens))
        for token_id in stop_ids:
            tokens[token_id] = b""
        return cls(tokens=tokens, stop_ids=stop_ids)

    @property
    def mask_width(self) -> int:
        """Words of one mask."""
        return mask_width(len(self.tokens))


def stop_ids_of(model: ModelInfo, tokenizer_stop_ids: Iterable[int]) -> tuple[int, ...]:
    """Every id that ends a text, by the model's account or the tokenizer's."""
    return tuple(sorted(token_id for token_id in {*model.eos_token_ids, *tokenizer_stop_ids} if token_id < model.vocab_size))


class Matcher(Protocol):
    """Where one request stands in its grammar. Not shared between requests, nor between threads at the same time."""

    @property
    def is_terminated(self) -> bool:
        """A stop token was accepted, or nothing may follow: the output is complete."""

    def fill_mask(self, row: np.ndarray) -> None:
        """Write what may come next to row, int32 [mask_width]. Not after termination."""

    def accept(self, token_id: int) -> bool:
        """Take a token in. False: the grammar does not allow it here; the matcher is as it was, or of no more use."""

    def rollback(self, count: int) -> None:
        """Forget the newest ``count`` tokens."""

    def forced_text(self) -> str:
        """The text that must come next, maybe empty."""

    def fork(self) -> Matcher:
        """An independent copy."""


class CompiledGrammar(Protocol):
    """A loaded grammar, shared by all requests that use it."""

    def matcher(self) -> Matcher:
        """A new matcher at the beginning."""


class GrammarBackend(Protocol):
    """One grammar library over one vocabulary."""

    kinds: tuple[str, ...]  # that it can compile

    def compile(self, kind: str, text: str) -> bytes:
        """Compile in a worker process. Raises RequestError for a grammar that is wrong or not supported."""

    def load(self, data: bytes) -> CompiledGrammar:
        """Load what ``compile`` made, in the scheduler; takes milliseconds."""


def mask_width(vocab_size: int) -> int:
    """Words of a mask over the vocabulary."""
    return (vocab_size + 31) // 32


def is_installed(name: str) -> bool:
    """Whether the package of a backend is there; imports nothing."""
    return importlib.util.find_spec(BACKENDS[name][2]) is not None


def create_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """Import a backend and give it the vocabulary."""
    module, class_name, _ = BACKENDS[name]
    factory: Any = getattr(import_module(f".{module}", __package__), class_name)
    backend: GrammarBackend = factory(vocabulary)
    return backend
