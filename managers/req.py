"""Req: one request inside the scheduler, from its arrival to its last row of output."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from ..mem_cache.prefix_cache import CacheHold, CacheKey
from .constrained.constraint import Constraint
from .detokenizer import StopChecker
from .io_struct import CacheHint, FinishReason, GenerateReq, Timings, unpack_ids
from .logprobs.req_logprobs import ReqLogprobs
from .req_hidden import ReqHidden, embeds_of
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

NOT_ANNOUNCED = -1


@dataclass(slots=True, eq=False)
class Req:
    """A request that waits has row 0 and its tokens in token_ids; one that is seated has a row of the LiveTable, which holds its
    tokens and lengths. cached_tokens counts the prompt tokens found in the cache at its first admission, None before that."""

    rid: str
    params: SamplingParams
    key: CacheKey
    stream: bool
    arrival: int
    token_ids: np.ndarray  # int32, the prompt, and after a retraction the output so far
    num_prompt: int
    stop_ids: frozenset[int]  # its own stop tokens, besides the model's
    stop_checker: StopChecker | None
    seed: int
    priority: int | None = None
    cache_hint: CacheHint | None = None
    routing_key: str = ""
    timeout: float | None = None  # seconds from its arrival
    bad_word_ids: list[list[int]] = field(default_factory=list)
    logit_processor: str = ""
    logprobs: ReqLogprobs | None = None
    embeds: np.ndarray | None = None  # float32 [num_prompt, H], the prompt; its ids mean nothing
    hidden: ReqHidden | None = None
    probe: bool = False  # leaves nothing in the cache
    session_hold: str = ""  # the streaming session that keeps its KV when it ends by itself
    row: int = 0
    constraint: Constraint | None = None  # where it stands in its grammar
    jump: list[int] = field(default_factory=list)  # forced tokens behind the one that the step under way yields
    hold: CacheHold | None = None
    cached_tokens: int | None = None
    num_retractions: int = 0
    num_waits: int = 0  # prefill steps that passed it over, so that it finds more in the cache
    num_sent: int = NOT_ANNOUNCED  # tokens handed to the detokenizer while it has no row
    received: float = field(default_factory=time.monotonic)  # this and the next: for people, never for a decision
    first_seated: float = 0.0

    @classmethod
    def from_message(cls, message: GenerateReq, *, arrival: int, weight_version: str, tokenizer: Tokenizer) -> Req:
        params = message.sampling_params
        token_ids = unpack_ids(message.input_ids)
        return cls(
            rid=message.rid,
            params=params,
            key=CacheKey(
                weight_version=weight_version,
                extra_key=message.extra_key,
                cache_salt=message.cache_salt,
                embeds=message.embeds_key,
            ),
            stream=message.stream,
            arrival=arrival,
            token_ids=token_ids,
            num_prompt=len(token_ids),
            stop_ids=frozenset(params.stop_token_ids),
            stop_checker=StopChecker(tokenizer, params) if params.stop or params.stop_regex else None,
            seed=params.sampling_seed if params.sampling_seed is not None else arrival,
            priority=message.priority,
            cache_hint=message.cache_hint,
            routing_key=message.routing_key,
            bad_word_ids=message.bad_word_ids,
            logit_processor=message.logit_processor,
            logprobs=ReqLogprobs.of(message.logprobs, len(token_ids)) if message.logprobs else None,
            embeds=embeds_of(message),
            hidden=ReqHidden.of(message),
            session_hold=message.session_hold,
            timeout=message.timeout,
            probe=message.probe,
        )

    @property
    def matchable(self) -> np.ndarray:
        """The tokens of a request that waits whose KV may come from the cache."""
        limits = [len(self.token_ids) - 1]
        if self.logprobs and self.logprobs.max_match is not None:
            limits.append(self.logprobs.max_match)
        if self.hidden and self.hidden.taken is not None:
            limits.append(self.hidden.taken)
        return self.token_ids[: min(limits)]

    @property
    def has_controls(self) -> bool:
        """Its logits are changed before they are sampled, by more than bans of stop tokens."""
        params = self.params
        penalises = bool(params.frequency_penalty or params.presence_penalty) or params.repetition_penalty != 1
        bans = bool(params.logit_bias) or params.allowed_token_ids is not None or bool(self.bad_word_ids)
        return penalises or bans or bool(self.logit_processor)

    @property
    def num_tokens(self) -> int:
        """Tokens of a request that waits."""
        return len(self.token_ids)

    @property
    def max_new_tokens(self) -> int:
        """Output tokens that it may still get while it waits."""
        return self.max_len - len(self.token_ids)

    @property
    def max_len(self) -> int:
        """Sequence length at which it ends."""
        limit = self.params.max_new_tokens
        if limit is None:
            raise ValueError(f"request {self.rid}: max_new_tokens must be resolved before scheduling")
        return self.num_prompt + limit

    def note_seated(self) -> None:
        """It has a row; the first time counts."""
        self.first_seated = self.first_seated or time.monotonic()

    def timings(self) -> Timings:
        """When it came to its phases, asked when its first token is there."""
        now = time.monotonic()
        return Timings(received=self.received, seated=self.first_seated or now, sampled=now)

    def held(self) -> CacheHold:
        """What a seated request holds of the cache."""
        if self.hold is None:
            raise RuntimeError(f"request {self.rid} holds nothing of the cache")
        return self.hold

    def stop_reason(self, token_id: int) -> FinishReason | None:
        """Whether its newest token ends it by one of its own stop strings or stop tokens."""
        matched = self.stop_checker.push(token_id) if self.stop_checker else None
        if matched is not None:
            return FinishReason(kind="stop", matched=matched)
        if token_id in self.stop_ids:
            return FinishReason(kind="stop", matched=token_id)
        return None
