"""Grammars by xgrammar: a pushdown automaton with token masks that are mostly computed when it is compiled.

Only the bindings of the package are loaded: its ``__init__`` imports torch and transformers, which takes seconds and hundreds of
megabytes and which neither compiling nor matching needs. So this depends on how that very version is laid out.

JSON is written on one line, with one blank behind each comma and colon: with free whitespace a model may write blanks for ever, and
a bound on their number makes grammars tens of times larger.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
import types
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from ..errors import RequestError
from .forced_length import ENDLESS, MAX_FORCED, longest_forced
from .grammar import EBNF, JSON_SCHEMA, KINDS, REGEX, CompiledGrammar, Matcher, Vocabulary

RAW = 0  # the vocabulary is given as the bytes of its tokens
_PACKAGE = "xgrammar"


@functools.cache
def _bindings() -> Any:
    """The package's native classes. Imports them under a stand-in for the package, unless that is imported already."""
    if _PACKAGE in sys.modules:
        return import_module("xgrammar.base")._core
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("xgrammar is not installed")
    stand_in = types.ModuleType(_PACKAGE)
    stand_in.__path__ = list(spec.submodule_search_locations)
    # tvm_ffi imports torch where it finds it. None in sys.modules means: not to be found.
    no_torch = "torch" not in sys.modules
    sys.modules[_PACKAGE] = stand_in
    if no_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import_module("xgrammar.load_binding")
        return import_module("xgrammar.base")._core
    finally:
        del sys.modules[_PACKAGE]
        if no_torch:
            del sys.modules["torch"]


class XGrammarBackend:
    """Implements GrammarBackend."""

    kinds = KINDS

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._core = _bindings()
        self._info = self._core.TokenizerInfo(vocabulary.tokens, RAW, len(vocabulary.tokens), list(vocabulary.stop_ids), False)

    def compile(self, kind: str, text: str) -> bytes:
        begin = time.perf_counter()
        try:
            compiled = self._compile(kind, text)
        except (RuntimeError, ValueError, TypeError) as error:
            raise RequestError(f"{kind}: {_reason(error)}", param=kind) from None
        compiled_at = time.perf_counter()
        self._check_length(kind, compiled)
        written = str(compiled.serialize_json())
        written_at = time.perf_counter()
        self._core.CompiledGrammar.deserialize_json(written, self._info)
        loaded_at = time.perf_counter()
        # Reading a large grammar takes longer than compiling it again, once it is known to compile in time.
        form = _Text(kind, text) if compiled_at - begin < loaded_at - written_at else _Written(written)
        return msgspec.msgpack.encode(form)

    def _check_length(self, kind: str, compiled: Any) -> None:
        forced = longest_forced(str(compiled.grammar().serialize_json()), self._regex_grammar)
        if forced >= ENDLESS:
            raise RequestError(f"{kind}: there is a way into it that never comes to an end.", param=kind)
        if forced > MAX_FORCED:
            raise RequestError(f"{kind}: it may force {forced} bytes of text at once, more than {MAX_FORCED}.", param=kind)

    def _regex_grammar(self, pattern: str) -> str:
        return str(self._core.Grammar.from_regex(pattern, False).serialize_json())

    def load(self, data: bytes) -> CompiledGrammar:
        form = msgspec.msgpack.decode(data, type=_Text | _Written)
        if isinstance(form, _Text):
            return _Compiled(self._core, self._compile(form.kind, form.text))
        return _Compiled(self._core, self._core.CompiledGrammar.deserialize_json(form.json, self._info))

    def _compile(self, kind: str, text: str) -> Any:
        compiler = self._core.GrammarCompiler(self._info, 1, False, -1, False)
        if kind == JSON_SCHEMA:
            return compiler.compile_json_schema(text, False, None, None, True, None, False)
        if kind == REGEX:
            return compiler.compile_regex(text)
        if kind == EBNF:
            return compiler.compile_grammar_from_strings(text, "root")
        return compiler.compile_structural_tag(text)


class _Text(msgspec.Struct, tag=True, array_like=True):
    """A grammar that is compiled again when it is loaded."""

    kind: str
    text: str


class _Written(msgspec.Struct, tag=True, array_like=True):
    """A compiled grammar."""

    json: str


class _Compiled:
    def __init__(self, core: Any, handle: Any) -> None:
        self._core, self._handle = core, handle

    def matcher(self) -> Matcher:
        return _Matcher(self._core.GrammarMatcher(self._handle, None, False, -1, None))


class _Matcher:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def is_terminated(self) -> bool:
        return bool(self._handle.is_terminated())

    def fill_mask(self, row: np.ndarray) -> None:
        if not self._handle.fill_next_token_bitmask(row[None], 0, False):
            row[:] = -1  # everything is allowed

    def accept(self, token_id: int) -> bool:
        return bool(self._handle.accept_token(token_id, False))

    def rollback(self, count: int) -> None:
        self._handle.rollback(count)

    def forced_text(self) -> str:
        return str(self._handle.find_jump_forward_string())

    def fork(self) -> Matcher:
        return _Matcher(self._handle.fork())


def _reason(error: Exception) -> str:
    """The library's complaint without the place in its source."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line.split(".cc:", 1)[-1].split(": ", 1)[-1] if ".cc:" in line else line
