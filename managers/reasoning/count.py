"""How many tokens of an answer are thinking, its marks included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..constrained.thinking import Phase, Thinking, ThinkingParams, ThinkingPlanner


class ReasoningCount:
    """Over the choices of one request, which share a prompt. ``add`` takes the token ids of a choice as they come."""

    def __init__(self, parser: str | None, tokenizer: Any, prompt: Sequence[int]) -> None:
        """parser: a name of REASONING_MARKS, None: nothing is thinking."""
        self._table = None if parser is None else tokenizer.byte_table
        self._params: ThinkingParams | None = None
        if self._table is not None:
            self._params = ThinkingPlanner(parser, tokenizer).params(prompt, None)
        self._open: dict[int, Thinking] = {}
        self._counts: dict[int, int] = {}
        self.total = 0

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """The next tokens of a choice."""
        if self._params is None or self._table is None:
            return
        if index not in self._counts:
            self._counts[index] = 0
            self._open[index] = Thinking(self._params, self._table.tokens.__getitem__)
        thinking = self._open.get(index)
        if thinking is not None:
            self._push(index, thinking, token_ids)

    def _push(self, index: int, thinking: Thinking, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            before = thinking.phase
            thinking.push(token_id)
            self._counts[index] += 1
            if thinking.phase is Phase.INSIDE:
                self.total += self._counts[index]
                self._counts[index] = 0
            elif thinking.phase is Phase.OVER:
                self.total += self._counts[index] if before is Phase.INSIDE else 0
                del self._open[index]
                return
