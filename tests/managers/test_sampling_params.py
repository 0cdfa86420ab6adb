"""SamplingParams.parse: defaults, conversions, and a 400 that names the field for everything else."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from banyan.managers.errors import RequestError
from banyan.managers.sampling_params import SamplingParams

VOCAB = 1000


def parse(**values: Any) -> SamplingParams:
    return SamplingParams.parse(values, VOCAB)


def test_defaults_are_sglangs() -> None:
    params = parse()
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (128, 1.0, 1.0, -1, 0.0)
    assert params.n == 1
    assert params.skip_special_tokens
    assert not params.ignore_eos


def test_null_means_default_except_for_the_limit() -> None:
    assert parse(temperature=None, top_p=None, stop=None, stop_token_ids=None) == parse()
    assert parse(max_new_tokens=None).max_new_tokens is None


def test_a_stop_may_be_one_string_and_empty_ones_are_dropped() -> None:
    assert parse(stop="END").stop == ["END"]
    assert parse(stop=["", "a"]).stop == ["a"]
    assert parse(stop_token_ids=5).stop_token_ids == [5]


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9.9e-7, True), (1e-6, False), (1.0, False)])
def test_only_a_temperature_below_the_threshold_is_greedy(temperature: float, greedy: bool) -> None:
    assert parse(temperature=temperature).is_greedy is greedy


def test_top_k_one_is_greedy() -> None:
    assert parse(top_k=1).is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1 << 40),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("n", 0),
        ("n", 100000),
        ("max_new_tokens", -1),
        ("max_new_tokens", "10"),
        ("max_new_tokens", True),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),
        ("stop", 5),
        ("stop", ["a"] * 33),
        ("stop", ["a" * 1025]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stream_interval", 0),
        ("stream_interval", 1 << 31),
        ("sampling_seed", 1 << 63),
        ("sampling_seed", "x"),
        ("ignore_eos", "yes"),
        ("frequency_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.5),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": math.inf}),
        ("logit_bias", {"1": math.nan}),
        ("logit_bias", {"1": 1e9}),
        ("logit_bias", {"1": "a"}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [VOCAB]),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 257),
        ("stop_regex", ["a"] * 33),
        ("stop_regex", "a" * 257),
        ("stop_regex", "a*"),
        ("stop_regex", "(?=a)b"),
        ("stop_regex", "^a"),
        ("stop_regex", "((a{1000}){1000}){9}"),
        ("custom_params", {"a": "x" * 70000}),
        ("custom_params", [1]),
    ],
)
def test_bad_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as info:
        parse(**{field: value})
    assert field in str(info.value)
    assert info.value.param == field
    assert info.value.status_code == 400


def test_last_token_of_the_vocabulary_is_a_good_stop() -> None:
    assert parse(stop_token_ids=[VOCAB - 1]).stop_token_ids == [VOCAB - 1]


def test_values_at_the_edge_are_good() -> None:
    edge = str(VOCAB - 1)
    params = parse(logit_bias={edge: -100, "0": 100}, allowed_token_ids=[VOCAB - 1], frequency_penalty=-2, repetition_penalty=2)
    assert params.logit_bias == {edge: -100.0, "0": 100.0}
    assert parse(stop_regex="a|b", bad_words="x").stop_regex == ["a|b"]
    assert parse(stop_regex=["", "a"]).stop_regex == ["a"]


def test_unknown_field_names_the_closest() -> None:
    with pytest.raises(RequestError, match=r"unknown field `max_tokens`; did you mean `max_new_tokens`"):
        parse(max_tokens=5)
    with pytest.raises(RequestError, match=r"unknown field `zzz`; known are max_new_tokens"):
        parse(zzz=1)


def test_travels_by_message() -> None:
    params = parse(stop=["a"], sampling_seed=-5, max_new_tokens=None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
