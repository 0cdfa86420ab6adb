"""Thinking: where a request stands in the thinking part of its output, and what it must sample there.

The marks are found in the bytes of the output, so that it does not matter into which tokens a model splits them; to force one, the
tokens are used that the tokenizer makes of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ..errors import RequestError
from ..reasoning.marks import REASONING_MARKS

MAX_BUDGET = 1 << 31
MAX_TAIL = 64  # tokens at a prompt's end that are looked at: a template closes its mark with blanks at most


class ThinkingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one request thinks. is_open: its output begins inside the thinking part; else the output may open it with the start mark.

    budget: most tokens of the thinking part before its end mark, None for no limit.
    """

    start_ids: list[int]
    end_ids: list[int]
    is_open: bool
    budget: int | None = None


class Phase(enum.Enum):
    """Of an output."""

    BEFORE = 1  # nothing but the beginning of a start mark was sampled, maybe nothing at all
    INSIDE = 2
    OVER = 3


class Thinking:
    """``push`` takes in each sampled token. token_bytes gives the bytes of a token, special ones included."""

    def __init__(self, params: ThinkingParams, token_bytes: Callable[[int], bytes]) -> None:
        self._params = params
        self._bytes = token_bytes
        self._start = b"".join(map(token_bytes, params.start_ids))
        self._end = b"".join(map(token_bytes, params.end_ids))
        self._tail = b""
        self._recent: list[int] = []
        self._num_inside = 0
        self.phase = Phase.INSIDE if params.is_open else Phase.BEFORE

    @property
    def next_start(self) -> int | None:
        """The token that goes on with the start mark, before the thinking part."""
        start, count = self._params.start_ids, len(self._recent)
        return start[count] if self.phase is Phase.BEFORE and self._recent == start[:count] else None

    @property
    def forced(self) -> int | None:
        """The token of the end mark that must come next, because the budget is used up."""
        budget, end = self._params.budget, self._params.end_ids
        if self.phase is not Phase.INSIDE or budget is None or self._num_inside < budget:
            return None
        matched = next(count for count in range(len(end) - 1, -1, -1) if self._recent[len(self._recent) - count :] == end[:count])
        return end[matched]

    def push(self, token_id: int) -> None:
        """Take in a token of the output."""
        self._tail += self._bytes(token_id)
        self._recent.append(token_id)
        if self.phase is Phase.BEFORE:
            self._open()
        elif self.phase is Phase.INSIDE:
            self._num_inside += 1
            if self._end in self._tail:
                self.phase = Phase.OVER
            self._tail = self._tail[-len(self._end) :]
            del self._recent[: -len(self._params.end_ids)]

    def _open(self) -> None:
        if self._tail.startswith(self._start):
            self.phase = Phase.INSIDE
            self._tail, self._recent = b"", []
        elif not self._start.startswith(self._tail):
            self.phase = Phase.OVER


class Coder(Protocol):
    """What the planner needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""


class ThinkingPlanner:
    """Made at start for one model: says how each request thinks."""

    def __init__(self, parser: str | None, tokenizer: Coder) -> None:
        """parser: a name of REASONING_MARKS, None for a model that does not think."""
        self._marks = None if parser is None else REASONING_MARKS[parser]
        self._tokenizer = tokenizer
        if self._marks is not None:
            self._start_ids = tokenizer.encode(self._marks.start, add_special_tokens=False)
            self._end_ids = tokenizer.encode(self._marks.end, add_special_tokens=False)

    def check(self, *, wanted: bool, budget: int | None) -> None:
        """Raises RequestError for what this server cannot do."""
        name = "require_reasoning" if wanted else "max_thinking_tokens"
        if (wanted or budget is not None) and self._marks is None:
            raise RequestError(f"{name} needs a server that was started with --reasoning-parser.", param=name)
        if budget is not None and not 0 <= budget < MAX_BUDGET:
            raise RequestError(f"max_thinking_tokens must be in [0, 2^31), got {budget}.", param="max_thinking_tokens")

    def params(self, prompt: Sequence[int], budget: int | None) -> ThinkingParams | None:
        """How the output of this prompt thinks; None if the prompt has closed the thinking part."""
        if self._marks is None:
            return None
        tail = self._tokenizer.decode(list(prompt[-MAX_TAIL:]), skip_special_tokens=False).rstrip()
        if tail.endswith(self._marks.end):
            return None
        is_open = self._marks.template_opens or tail.endswith(self._marks.start.rstrip())
        return ThinkingParams(start_ids=self._start_ids, end_ids=self._end_ids, is_open=is_open, budget=budget)
