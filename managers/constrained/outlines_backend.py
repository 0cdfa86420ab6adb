"""Regular expressions by outlines-core: a finite automaton over whole tokens, computed in full when it is compiled.

What is compiled is a table of transitions, which needs the library no more. Only regular expressions: the library turns a JSON
schema into one, but leaves out what it does not know without saying so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import RequestError
from .grammar import REGEX, CompiledGrammar, Matcher, Vocabulary, mask_width

HEADER = 4  # states, transitions, first state, vocabulary
NO_STATE = -1


class OutlinesBackend:
    """Implements GrammarBackend."""

    kinds = (REGEX,)

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def compile(self, kind: str, text: str) -> bytes:
        import outlines_core

        ids: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(self._vocabulary.tokens):
            if token:
                ids.setdefault(token, []).append(token_id)
        if not self._vocabulary.stop_ids:
            raise RequestError("regex: the model has no token that ends a text.", param=REGEX)
        try:
            index = outlines_core.Index(text, outlines_core.Vocabulary(self._vocabulary.stop_ids[0], ids))
        except ValueError as error:
            raise RequestError(f"regex: {error}", param=REGEX) from None
        return _pack(index.get_transitions(), index.get_initial_state(), index.get_final_states(), self._vocabulary)

    def load(self, data: bytes) -> CompiledGrammar:
        return _Table.unpack(data, self._vocabulary.stop_ids)


def _pack(edges: dict[int, dict[int, int]], first: int, final: set[int], vocabulary: Vocabulary) -> bytes:
    """int32: header, start of each state's transitions, its finality, then tokens and targets of all transitions."""
    states = sorted({first, *edges, *final, *(target for row in edges.values() for target in row.values())})
    number = {state: rank for rank, state in enumerate(states)}
    stops = set(vocabulary.stop_ids)
    rows = [sorted((token, number[to]) for token, to in edges.get(state, {}).items() if token not in stops) for state in states]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    flat = np.array([pair for row in rows for pair in row], np.int32).reshape(-1, 2)
    header = [len(states), len(flat), number[first], len(vocabulary.tokens)]
    finality = [int(state in final) for state in states]
    return np.concatenate([header, starts, finality, flat[:, 0], flat[:, 1]]).astype("<i4").tobytes()


@dataclass(slots=True)
class _Table:
    """The automaton: transitions of state s are [starts[s], starts[s + 1]) of tokens (ascending) and targets."""

    first: int
    starts: np.ndarray
    final: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray
    stop_ids: np.ndarray
    width: int

    @classmethod
    def unpack(cls, data: bytes, stop_ids: tuple[int, ...]) -> _Table:
        values = np.frombuffer(data, "<i4")
        num_states, num_edges, first, vocab_size = (int(value) for value in values[:HEADER])
        ends = np.cumsum([HEADER, num_states + 1, num_states, num_edges])
        _, starts, final, tokens, targets = np.split(values, ends)
        return cls(first, starts, final, tokens, targets, np.array(stop_ids, np.int32), width=mask_width(vocab_size))

    def matcher(self) -> Matcher:
        return _Matcher(self, [self.first])


class _Matcher:
    def __init__(self, table: _Table, states: list[int]) -> None:
        """states: where it was after each token, NO_STATE after a stop token."""
        self._table, self._states = table, states

    @property
    def is_terminated(self) -> bool:
        return self._states[-1] == NO_STATE

    def fill_mask(self, row: np.ndarray) -> None:
        if self.is_terminated:
            raise ValueError("the grammar is complete")
        bits = np.zeros(self._table.width * 32, np.bool_)
        bits[self._edges()[0]] = True
        bits[self._table.stop_ids] = bool(self._table.final[self._states[-1]])
        row[:] = np.packbits(bits, bitorder="little").view("<i4")

    def accept(self, token_id: int) -> bool:
        if self.is_terminated:
            return False
        if token_id in self._table.stop_ids:
            if not self._table.final[self._states[-1]]:
                return False
            self._states.append(NO_STATE)
            return True
        tokens, targets = self._edges()
        at = int(np.searchsorted(tokens, token_id))
        if at == len(tokens) or tokens[at] != token_id:
            return False
        self._states.append(int(targets[at]))
        return True

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self._states):
            raise ValueError(f"cannot roll back {count} tokens")
        del self._states[len(self._states) - count :]

    def forced_text(self) -> str:
        return ""  # bytes of tokens are not kept in the table

    def fork(self) -> Matcher:
        return _Matcher(self._table, list(self._states))

    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        state = self._states[-1]
        edges = slice(int(self._table.starts[state]), int(self._table.starts[state + 1]))
        return self._table.tokens[edges], self._table.targets[edges]
