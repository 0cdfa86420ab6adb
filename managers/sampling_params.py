"""SamplingParams: how one request is sampled and when it stops, and the only place where that is validated.

Order of the sampler: repetition, frequency and presence penalty -> logit_bias -> allowed_token_ids, bad_words -> logit processor ->
min_new_tokens -> (log-probabilities are read here, divided by temperature) -> grammar -> temperature -> top_k -> top_p over what
top_k kept, renormalised -> min_p relative to the best token -> one draw by inverse CDF, from a hash of (seed, position).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import RequestError
from .nesting import check_depth
from .stop_regex import MAX_STATES, RegexError, num_states

GREEDY_EPS = 1e-6  # temperatures below are greedy
MAX_STOP_STRINGS = 32
MAX_STOP_LEN = 1024  # characters of one stop string
MAX_STOP_REGEX_LEN = 256  # characters of one pattern
MAX_LOGIT_BIAS = 4096  # entries
MAX_BIAS = 1e4
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LEN = 256  # characters
MAX_CUSTOM_PARAMS = 64 << 10  # bytes as MessagePack, a little less than as JSON
MAX_N = 128
SEED_RANGE = 1 << 63

# Parameters that clients send and that are not served, with the values (besides null) that change nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {}
_ID = re.compile(r"0|[1-9][0-9]{0,9}")
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names and defaults are SGLang's. Build it with ``parse``; a null in the input means the default."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    custom_params: dict[str, Any] = {}
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
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

    def grammar(self) -> tuple[str, str] | None:
        """Kind and text of the grammar that the output must follow."""
        given = [(name, text) for name in GRAMMAR_FIELDS if (text := getattr(self, name)) is not None]
        return given[0] if given else None

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
        for name, kind in (("stop", str), ("stop_regex", str), ("bad_words", str), ("stop_token_ids", int)):
            if isinstance(given.get(name), kind):
                given[name] = [given[name]]
        _read_grammars(given)
        try:
            params = msgspec.convert(given, cls, strict=True)
        except msgspec.ValidationError as error:
            name = str(error).partition("`$.")[2].split("`")[0].split("[")[0]
            raise RequestError(f"sampling_params: {error}", param=name or "sampling_params") from None
        params._check_ranges()
        params._check_stops(vocab_size)
        params._check_tokens(vocab_size)
        return params

    def _check_ranges(self) -> None:
        checks = [
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a non-negative finite number"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("top_k", self.top_k == -1 or 1 <= self.top_k < 1 << 31, "-1 (disable) or at least 1"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 2, "in (0, 2] (1.0 = no penalty)"),
            ("n", 1 <= self.n <= MAX_N, f"in [1, {MAX_N}]"),
            ("stream_interval", 1 <= self.stream_interval < 1 << 31, "in [1, 2^31)"),
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
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        self.stop_regex = [pattern for pattern in self.stop_regex if pattern]
        if len(self.stop_regex) > MAX_STOP_STRINGS or any(len(pattern) > MAX_STOP_REGEX_LEN for pattern in self.stop_regex):
            raise RequestError(
                f"stop_regex: at most {MAX_STOP_STRINGS} patterns of at most {MAX_STOP_REGEX_LEN} characters.", param="stop_regex"
            )
        if not self.stop_regex:
            return
        try:
            total = sum(map(len, self.stop)) + sum(map(num_states, self.stop_regex))
        except RegexError as error:
            raise RequestError(f"stop_regex: {error}", param="stop_regex") from None
        if total > MAX_STATES:
            raise RequestError("stop_regex: the patterns and stop strings together are too long.", param="stop_regex")

    def _check_tokens(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias: at most {MAX_LOGIT_BIAS} entries.", param="logit_bias")
        for key, value in self.logit_bias.items():
            if not (_ID.fullmatch(key) and int(key) < vocab_size):
                raise RequestError(f"logit_bias must have keys in [0, {vocab_size - 1}], got {key[:20]}.", param="logit_bias")
            if not abs(value) <= MAX_BIAS:
                raise RequestError(f"logit_bias must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {value}.", param="logit_bias")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty.", param="allowed_token_ids")
            _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS or any(not 0 < len(word) <= MAX_BAD_WORD_LEN for word in self.bad_words):
            raise RequestError(
                f"bad_words: at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_LEN} characters.", param="bad_words"
            )
        if self.custom_params:
            _check_custom(self.custom_params)


def _read_grammars(given: dict[str, Any]) -> None:
    """At most one grammar; an object stands for its JSON, an empty string for nothing."""
    for name in GRAMMAR_FIELDS:
        if given.get(name) == "":
            del given[name]
        elif isinstance(given.get(name), dict):
            given[name] = msgspec.json.encode(given[name]).decode()
    names = [name for name in GRAMMAR_FIELDS if name in given]
    if len(names) > 1:
        raise RequestError(f"sampling_params: only one of {', '.join(names)} may be given.", param=names[1])


def _check_custom(params: dict[str, Any]) -> None:
    """Whether they can travel between processes."""
    check_depth("custom_params", params)
    try:
        size = len(msgspec.msgpack.encode(params))
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise RequestError(f"custom_params: {error}.", param="custom_params") from None
    if size > MAX_CUSTOM_PARAMS:
        raise RequestError(f"custom_params: at most {MAX_CUSTOM_PARAMS} bytes.", param="custom_params")


def _check_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    if len(token_ids) > vocab_size:
        raise RequestError(f"{name}: at most {vocab_size} ids.", param=name)
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name} must be in [0, {vocab_size - 1}], got {token_id}.", param=name)


def _unknown_field(key: str, known: tuple[str, ...]) -> RequestError:
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(known)}."
    return RequestError(f"sampling_params: unknown field `{key}`{hint}", param=str(key))
