"""Grammars over the oracle's vocabulary, in which id FIRST + b stands for byte b."""

from __future__ import annotations

from harness import EOS, VOCAB

from banyan.managers.constrained.grammar import CompiledGrammar, Vocabulary, create_backend

FIRST = 3  # id of byte 0
WORDS = Vocabulary(tokens=[b""] * FIRST + [bytes([byte]) for byte in range(256)] + [b""] * (VOCAB - 256 - FIRST), stop_ids=(EOS,))
DIGITS = "[0-9]{3,12}x"


def grammar(kind: str, text: str) -> CompiledGrammar:
    backend = create_backend("xgrammar", WORDS)
    return backend.load(backend.compile(kind, text))
