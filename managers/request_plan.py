"""RequestPlan: a request that was checked but for its prompts' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .io_struct import CacheHint, HiddenWish, LogprobParams
from .sampling_params import SamplingParams
from .score_tree import ScoreTree
from .sessions.sessions import SessionParams, Turn


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """How a request wants to be served; the same for all its prompts.

    thinks: an output may have a thinking part, of at most max_thinking_tokens.
    """

    priority: int | None
    cache_hint: CacheHint | None
    routing_key: str
    data_parallel_rank: int | None
    timeout: float | None
    thinks: bool
    max_thinking_tokens: int | None


class RequestPlan(msgspec.Struct, kw_only=True):
    """A request with its batch shape and parameters checked. Lists have one entry per prompt, rids and families one per output."""

    texts: list[str] | None
    ids: list[Sequence[int]] | None
    embeds: list[Any] | None  # where the prompts are neither
    is_single_prompt: bool
    n: int
    params: list[SamplingParams]
    explicit_limits: list[bool]  # the request itself brought max_new_tokens
    namespaces: list[tuple[str, str]]  # extra_key and cache_salt
    processors: list[str]
    rooms: Sequence[int | None]
    logprobs: list[LogprobParams | None]  # start_len may be -1 still
    hidden: list[HiddenWish]  # of each prompt: which hidden states are wanted
    rids: list[str]
    families: list[str]  # the client's rid that each rid was made from
    stream: bool
    session: SessionParams | None
    service: Service
    continued: str | list[int] | None = None  # the prompt that all items go on from

    turn: Turn | None = None  # what the one prompt continues, found after the plan was made
    tree: ScoreTree | None = None  # how its scores are computed, found with its tokens, if that is all it asks for

    @property
    def num_prompts(self) -> int:
        return len(self.params)

    @property
    def only_scores(self) -> bool:
        """It asks for nothing but the log-probabilities of continuations, each from its own first token on, in one namespace."""
        plain = LogprobParams(start_len=-1)
        return (
            self.continued is not None
            and self.n == 1
            and all(wanted == plain for wanted in self.logprobs)
            and all(params.max_new_tokens == 0 for params in self.params)
            and not any(self.hidden)
            and self.service.cache_hint is None
            and len(set(self.namespaces)) == 1
        )
