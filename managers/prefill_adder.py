"""Whom to admit to the next prefill step, and how much of each prompt: pure arithmetic over plain numbers.

The plan is safe without taking a lock: a match reports how many evictable tokens locking it would pin, and the budget counts them
as spent. Constants and rules follow SGLang's PrefillAdder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

CLIP_MAX_NEW_TOKENS = 4096  # more output than this is not reserved in advance


class Candidate(NamedTuple):
    """A request that could be admitted. continuing: a chunked prompt that has its row and was counted when it was admitted."""

    num_tokens: int
    prefix_len: int  # tokens whose KV is there already
    pinned: int  # evictable tokens that admission would lock
    max_new_tokens: int
    continuing: bool = False


class Admission(NamedTuple):
    """Compute the tokens [prefix_len, prefix_len + extend_len) of the candidate at queue_index."""

    queue_index: int
    prefix_len: int
    extend_len: int
    final: bool  # the prompt is complete after this step


@dataclass(slots=True)
class PrefillBudget:
    """What one prefill step may use.

    free_tokens: slots that are free or evictable. reserved_tokens: those that running requests are expected to need.
    chunk_tokens: None when prompts are never split. rows: requests that may join.
    """

    free_tokens: int
    reserved_tokens: float
    input_tokens: int
    chunk_tokens: int | None
    rows: int
    page_size: int

    def ceil_page(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    def floor_page(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size

    @property
    def room(self) -> float:
        """Tokens that are neither taken nor reserved."""
        return self.free_tokens - self.reserved_tokens

    def need(self, candidate: Candidate) -> int:
        """Tokens that all of the candidate, with its output, takes out of the room.

        Prompt and output are rounded up to pages together, so that a request that fits an empty pool fits it after any
        retraction too: it would wait for ever otherwise.
        """
        total = self.ceil_page(candidate.num_tokens + min(candidate.max_new_tokens, CLIP_MAX_NEW_TOKENS))
        return total - candidate.prefix_len + self.page_size + candidate.pinned

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits beside what runs and what was admitted before it."""
        return self.need(candidate) <= self.room

    def spend(self, candidate: Candidate, extend_len: int, *, final: bool) -> None:
        """Take an admission out of the budget."""
        cost = self.ceil_page(extend_len)
        self.free_tokens -= cost + candidate.pinned
        self.reserved_tokens += self.page_size + (min(candidate.max_new_tokens, CLIP_MAX_NEW_TOKENS) if final else 0)
        self.input_tokens -= cost
        if self.chunk_tokens is not None:
            self.chunk_tokens -= cost
        self.rows -= not candidate.continuing


def plan_prefill(candidates: Iterable[Candidate], budget: PrefillBudget) -> list[Admission]:
    """Admit candidates in their order until one does not fit; ``budget`` is used up on the way.

    The first prompt is taken even if it is longer than input_tokens. Only the last admission may be partial. The candidates are
    pulled one by one, so that a lazy iterable looks no further into the queue than needed.
    """
    plan: list[Admission] = []
    for index, candidate in enumerate(candidates):
        extend = _extend_len(candidate, budget, first=not plan)
        if extend <= 0:
            break
        final = candidate.prefix_len + extend == candidate.num_tokens
        plan.append(Admission(index, candidate.prefix_len, extend, final))
        budget.spend(candidate, extend, final=final)
        if not final or budget.input_tokens <= 0 or budget.rows <= 0:
            break
    return plan


def _extend_len(candidate: Candidate, budget: PrefillBudget, *, first: bool) -> int:
    """Tokens of the candidate to compute now; 0 means not now."""
    rest = candidate.num_tokens - candidate.prefix_len
    if candidate.continuing:
        room = budget.floor_page(budget.free_tokens)
    elif budget.rows <= 0 or not budget.fits(candidate) or (not first and budget.ceil_page(rest) > budget.input_tokens):
        return 0
    else:
        room = rest
    if budget.chunk_tokens is not None:
        room = min(room, budget.chunk_tokens)
    return rest if rest <= room else budget.floor_page(room)
