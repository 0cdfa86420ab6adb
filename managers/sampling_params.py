"""SamplingParams: how one request is sampled and when it stops, and the only place where that is validated.

Order of the sampler: banned tokens (min_new_tokens) -> temperature -> top_k -> top_p over what top_k kept, renormalised -> min_p
relative to the best token -> one draw by inverse CDF, from a hash of (seed, position).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import RequestError

GREEDY_EPS = 1e-6  # temperatures below are greedy
MAX_STOP_STRINGS = 32
MAX_STOP_LEN = 1024  # characters of one stop string
MAX_N = 128
SEED_RANGE = 1 << 63

# Parameters that clients send and that are not served, with the values (besides null) that change nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "stop_regex": ("", []),
    "logit_bias": ({},),
    "custom_params": ({},),
}


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names and defaults are SGLang's. Build it with ``parse``; a null in the input means the default."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1
    sampling_seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS or self.top_k == 1

    @classmethod
    def parse(cls, values: Mapping[str, Any], vocab_size: int) -> SamplingParams:
        """Check a request's dict. Raises RequestError that names the field."""
        known = cls.__struct_fields__
        for key, value in values.items():
            if key in NOT_SERVED:
                if value is not None and value not in NOT_SERVED[key]:
                    raise RequestError(f"sampling_params: {key} is not supported.", param=key)
            elif key not in known:
                raise _unknown_field(key, known)
        given = {key: value for key, value in values.items() if value is not None and key in known}
        if "max_new_tokens" in values and values["max_new_tokens"] is None:
            given["max_new_tokens"] = None
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        if isinstance(given.get("stop_token_ids"), int):
            given["stop_token_ids"] = [given["stop_token_ids"]]
        try:
            params = msgspec.convert(given, cls, strict=True)
        except msgspec.ValidationError as error:
            name = str(error).partition("`$.")[2].split("`")[0].split("[")[0]
            raise RequestError(f"sampling_params: {error}", param=name or "sampling_params") from None
        params._check_ranges()
        params._check_stops(vocab_size)
        return params

    def _check_ranges(self) -> None:
        checks = [
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a non-negative finite number"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("top_k", self.top_k == -1 or 1 <= self.top_k < 1 << 31, "-1 (disable) or at least 1"),
            ("n", 1 <= self.n <= MAX_N, f"in [1, {MAX_N}]"),
            ("stream_interval", self.stream_interval >= 1, "at least 1"),
            ("max_new_tokens", self.max_new_tokens is None or self.max_new_tokens >= 0, "at least 0"),
        ]
        for name, good, rule in checks:
            if not good:
                raise RequestError(f"{name} must be {rule}, got {getattr(self, name)}.", param=name)
        limit = self.max_new_tokens
        if self.min_new_tokens < 0 or (limit is not None and self.min_new_tokens > limit):
            raise RequestError(
                f"min_new_tokens must be in [0, max_new_tokens({limit})], got {self.min_new_tokens}.", param="min_new_tokens"
            )
        if self.sampling_seed is not None and not -SEED_RANGE <= self.sampling_seed < SEED_RANGE:
            raise RequestError(f"sampling_seed must fit into 64 bits, got {self.sampling_seed}.", param="sampling_seed")

    def _check_stops(self, vocab_size: int) -> None:
        self.stop = [stop for stop in self.stop if stop]
        if len(self.stop) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_LEN for stop in self.stop):
            raise RequestError(f"stop: at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LEN} characters.", param="stop")
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"stop_token_ids must be in [0, {vocab_size - 1}], got {token_id}.", param="stop_token_ids")


def _unknown_field(key: str, known: tuple[str, ...]) -> RequestError:
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(known)}."
    return RequestError(f"sampling_params: unknown field `{key}`{hint}", param=str(key))
