"""Whatever a client sends is answered with a 200 or a 400 that names the field, and harms nothing."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import httpx
import pytest
from harness import EOS, SCRIPT, VOCAB
from server import Server

from banyan.managers.generation import UNSUPPORTED
from banyan.managers.sampling_params import NOT_SERVED, SamplingParams

CONTEXT = 256  # of the narrow server
QUICK = {"max_new_tokens": 2, "temperature": 0}


def refused(reply: httpx.Response, param: str | None) -> str:
    """A 400 with one short line that names the field; returns it."""
    assert reply.status_code == 400, (reply.status_code, reply.text[:300])
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error["code"] == 400
    assert error["param"] == param, error
    assert "\n" not in error["message"]
    assert len(error["message"]) < 1000
    return str(error["message"])


SAMPLING = [
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 1 << 40}, "max_new_tokens"),
    ({"max_new_tokens": CONTEXT}, "max_new_tokens"),
    ({"max_new_tokens": 1.5}, "max_new_tokens"),
    ({"max_new_tokens": "8"}, "max_new_tokens"),
    ({"max_new_tokens": True}, "max_new_tokens"),
    ({"min_new_tokens": 100_000, "max_new_tokens": None}, "min_new_tokens"),
    ({"min_new_tokens": 100_000}, "min_new_tokens"),
    ({"min_new_tokens": 3, "max_new_tokens": 2}, "min_new_tokens"),
    ({"min_new_tokens": -1}, "min_new_tokens"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [VOCAB], "min_new_tokens": 2}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": [2**64]}, "stop_token_ids"),
    ({"stop_token_ids": [5] * (VOCAB + 1)}, "stop_token_ids"),
    ({"allowed_token_ids": [5] * (VOCAB + 1)}, "allowed_token_ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"custom_params": {"x": 10**30}}, "custom_params"),
    ({"custom_params": {"x": json.loads("[" * 150 + "]" * 150)}}, "custom_params"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", None]}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": "x" * 100_000}, "stop"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1 << 31}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"n": None, "top_p": 2}, "top_p"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"sampling_seed": 1 << 63}, "sampling_seed"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temprature": 0}, "temprature"),
    ({"": 0}, ""),
]
PROMPTS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "text"),
    ({"text": None, "input_ids": None}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", ""]}, "text"),
    ({"text": 5}, "text"),
    ({"text": ["a", 5]}, "text"),
    ({"text": {"a": 1}}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [[1], 2]}, "input_ids"),
    ({"input_ids": [[[1]]]}, "input_ids"),
    ({"input_ids": "abc"}, "input_ids"),
    ({"input_ids": 7}, "input_ids"),
    ({"input_ids": [VOCAB]}, "input_ids"),
    ({"input_ids": [5, VOCAB - 1, VOCAB]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [1 << 31]}, "input_ids"),
    ({"input_ids": [(1 << 63) - 1]}, "input_ids"),
    ({"input_ids": [1 << 63]}, "input_ids"),
    ({"input_ids": [1 << 70]}, "input_ids"),
    ({"input_ids": [1.0]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [None]}, "input_ids"),
    ({"input_ids": ["1"]}, "input_ids"),
    ({"input_ids": [5] * CONTEXT}, "input_ids"),
    ({"input_ids": [5] * 300_000}, "input_ids"),
    ({"input_ids": [[5], [5] * CONTEXT]}, "input_ids"),
    ({"text": "word " * CONTEXT}, "text"),
    ({"text": "x" * 2_000_000}, "text"),
    ({"text": "x" * 2_000_000, "continuations": ["a"] * 60_000}, "continuations"),
    ({"input_ids": [5] * 200, "continuations": [[6]] * 70_000}, "continuations"),
    ({"text": "a", "max_thinking_tokens": 10**30}, "max_thinking_tokens"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["x", ""]}, "rid"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": "a", "rid": 7}, "rid"),
    ({"text": ["a", "b"], "sampling_params": [QUICK]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
    ({"text": "a", "sampling_params": "x"}, "sampling_params"),
    ({"text": "a", "sampling_params": [1]}, "sampling_params"),
    ({"text": ["a", "b"], "extra_key": ["x"]}, "extra_key"),
    ({"text": "a", "extra_key": 5}, "extra_key"),
    ({"text": "a", "cache_salt": {"a": "b"}}, "cache_salt"),
    ({"text": "a", "stream": "yes"}, "stream"),
    ({"text": "a", "stream": 1}, "stream"),
    ({"text": "a", "incremental": []}, "incremental"),
    ({"text": "a", "priority": "high"}, "priority"),
    ({"text": "a", "return_prompt_token_ids": "x"}, "return_prompt_token_ids"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_sampling_parameters(narrow: Server, stream: bool) -> None:
    for params, param in SAMPLING:
        refused(narrow.post({"text": "a", "sampling_params": {**QUICK, **params}, "stream": stream}), param)
    narrow.check()


@pytest.mark.parametrize("stream", [False, True])
def test_bad_prompts(narrow: Server, stream: bool) -> None:
    for body, param in PROMPTS:
        refused(narrow.post({"sampling_params": QUICK, "stream": stream, **body}), param)
    narrow.check()


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_served_is_refused(narrow: Server, stream: bool) -> None:
    for name in UNSUPPORTED:
        message = refused(narrow.post({"text": "a", "stream": stream, name: [1]}), name)
        assert message == f"{name} is not supported."
    for name in NOT_SERVED:
        refused(narrow.post({"text": "a", "stream": stream, "sampling_params": {name: "x"}}), name)
    for number in (2_000_000_000, -1):
        refused(
            narrow.post({"text": "a", "return_logprob": True, "top_logprobs_num": number, "stream": stream}), "top_logprobs_num"
        )
    off = dict.fromkeys(UNSUPPORTED) | {"priority": None, "rid": None, "stream": None, "sampling_params": None}
    assert narrow.generate(**off, text="a")["meta_info"]["completion_tokens"] > 0
    params = {name: values[0] for name, values in NOT_SERVED.items()} | QUICK
    assert narrow.generate(text="a", sampling_params=params)["meta_info"]["completion_tokens"] <= 2
    narrow.check()


BODIES = {
    b"": None,
    b"{": None,
    b"[]": None,
    b"null": None,
    b'"text"': None,
    b"\xff\xfe": None,
    b'{"text": "\xff"}': None,
    b'{"text": "\\ud800"}': None,
    b'{"text": "a", "sampling_params": {"temperature": NaN}}': None,
    b'{"text": "a", "sampling_params": {"temperature": Infinity}}': None,
    b'{"text": "a", "sampling_params": {"temperature": 1e999}}': None,
    b'{"text": "a", "sampling_params": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": None,
    b'{"text": "a"} {"text": "b"}': None,
    b'{"text": "a",}': None,
}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request"])
def test_bodies_that_are_no_json_objects(narrow: Server, path: str) -> None:
    for body in BODIES:
        reply = narrow.http.post(path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, (body[:80], reply.text[:200])
        assert "error" in reply.json()
    narrow.check()


def test_ids_at_the_edge_of_the_vocabulary(server: Server) -> None:
    """The bound is the model's vocabulary: ids that the tokenizer does not know are served."""
    for ids in ([5, VOCAB - 1], [VOCAB - 2], [0], [324, 400]):
        assert server.generate(input_ids=ids, sampling_params=QUICK)["meta_info"]["prompt_tokens"] == len(ids)
    answer = server.generate(input_ids=[SCRIPT, 2, 400, VOCAB - 1], sampling_params={"ignore_eos": True, "max_new_tokens": 2})
    assert (answer["output_ids"], answer["text"]) == ([400, VOCAB - 1], "")
    stop = server.generate(input_ids=[SCRIPT, 2, 400, VOCAB - 1], sampling_params={"stop_token_ids": [VOCAB - 1]})
    assert stop["meta_info"]["finish_reason"] == {"type": "stop", "matched": VOCAB - 1}


@pytest.mark.parametrize("length", [CONTEXT - 17, CONTEXT - 2, CONTEXT - 1])
def test_prompts_up_to_the_context(narrow: Server, length: int) -> None:
    answer = narrow.generate(input_ids=[7] * length, sampling_params={"max_new_tokens": None, "ignore_eos": True})
    assert answer["meta_info"]["completion_tokens"] == CONTEXT - length
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": CONTEXT - length}
    refused(narrow.post({"input_ids": [7] * length, "sampling_params": {"max_new_tokens": CONTEXT - length + 1}}), "max_new_tokens")


def test_limits_of_the_output(server: Server) -> None:
    prompt = [SCRIPT, 3, 40, 41, 42]
    for stream in (False, True):

        def ask(params: Any, stream: bool = stream) -> tuple[list[int], str]:
            body = {"input_ids": prompt, "sampling_params": params}
            answer = server.stream(**body)[-1] if stream else server.generate(**body)
            assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
            return answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]

        assert ask({"max_new_tokens": 0}) == ([], "length")
        assert ask({"max_new_tokens": 1}) == ([40], "length")
        assert ask({"max_new_tokens": 3}) == ([40, 41, 42], "length")
        for params in ({"max_new_tokens": 4}, {"max_new_tokens": None}, {}, None):
            assert ask(params) == ([40, 41, 42, EOS], "stop")
    reply = server.post({"prompt": prompt}, "/v1/completions").json()
    assert reply["usage"] == {**reply["usage"], "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert reply["choices"][0]["finish_reason"] == "stop"
    reply = server.post({"prompt": prompt, "max_tokens": None}, "/v1/completions").json()
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_null_is_the_default(server: Server) -> None:
    """Clients send every field they know, null where unset."""
    params: dict[str, Any] = dict.fromkeys(SamplingParams.__struct_fields__) | {"max_new_tokens": 4, "top_k": 1}
    fields = dict.fromkeys(["rid", "stream", "incremental", "extra_key", "cache_salt", "priority", "return_logprob", "lora_path"])
    answer = server.generate(text="the quick", sampling_params=params, **fields)
    few = server.generate(text="the quick", sampling_params={"max_new_tokens": 4, "top_k": 1})
    assert answer["output_ids"] == few["output_ids"]


def test_two_thousand_prompts_in_one_request(plain: Server) -> None:
    prompts = [[5, 6, index % 500] for index in range(2000)]
    answers = plain.generate(input_ids=prompts, sampling_params={"max_new_tokens": 1, "temperature": 0})
    assert [len(answer["output_ids"]) for answer in answers] == [1] * 2000
    assert answers[0]["output_ids"] == answers[500]["output_ids"]
    plain.check()


def test_a_batch_with_choices_is_prompt_major(server: Server) -> None:
    limits = [{"max_new_tokens": 3, "n": 3, "temperature": 0}, {"max_new_tokens": 2, "n": 3, "temperature": 0}]
    answers = server.generate(input_ids=[[5, 6], [7, 8]], sampling_params=limits, rid=["a", "b"])
    assert [len(answer["output_ids"]) for answer in answers] == [3, 3, 3, 2, 2, 2]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a_0", "a_1", "a_2", "b_0", "b_1", "b_2"]
    answers = server.generate(text=["a", "b"], sampling_params={**QUICK, "n": 2}, rid="x")
    assert [answer["meta_info"]["id"] for answer in answers] == ["x_0", "x_1", "x_2", "x_3"]
    assert isinstance(server.generate(text="a", sampling_params=QUICK), dict)
    assert len(server.generate(text="a", sampling_params={**QUICK, "n": 2})) == 2
    assert len(server.generate(text=["a"], sampling_params=QUICK)) == 1


VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 1.5, -0.0, 1e308, 1 << 31, -(1 << 63), (1 << 64) - 1),
    *("", "x", "\u0000", "世" * 50, "a" * 9000),
    *([], [[]], [0], [-1], [1, 2], ["a"], [None], [[1, 2], [3]], {}, {"a": 1}, [{}], [{}, {}], {"text": ["a"]}),
]
LOGPROB_FIELDS = [
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"),
    "custom_logit_processor",
]
FIELDS = ["text", "input_ids", "sampling_params", "rid", "stream", "incremental", "extra_key", "cache_salt", "priority"]


def mutants() -> list[dict[str, Any]]:
    """A good request with one field of every kind of value, and with three random ones."""
    draw = random.Random(7)
    good: dict[str, Any] = {"text": "a", "sampling_params": QUICK}
    bodies = [{**good, field: value} for field, value in itertools.product([*FIELDS, "return_prompt_token_ids"], VALUES)]
    bodies += [{**good, "return_logprob": True, field: value} for field, value in itertools.product(LOGPROB_FIELDS, VALUES)]
    for name, value in itertools.product(SamplingParams.__struct_fields__, VALUES):
        bodies.append({"text": "a", "sampling_params": {**QUICK, name: value}, "stream": draw.random() < 0.3})
    for _ in range(200):
        params = {draw.choice(SamplingParams.__struct_fields__): draw.choice(VALUES) for _ in range(3)}
        bodies.append({**good, "sampling_params": {**QUICK, **params}, draw.choice(FIELDS): draw.choice(VALUES)})
    return bodies


def test_a_request_with_any_value_in_any_field_is_answered(narrow: Server) -> None:
    for body in mutants():
        reply = narrow.post(body)
        assert reply.status_code in (200, 400), (body, reply.text[:300])
        if reply.status_code == 400:
            assert reply.json()["error"]["message"]
        elif reply.headers["content-type"].startswith("text/event-stream"):
            assert reply.text.endswith("data: [DONE]\n\n"), (body, reply.text[-300:])
        else:
            answers = json.loads(reply.text)
            for answer in answers if isinstance(answers, list) else [answers]:
                assert answer["meta_info"]["finish_reason"]["type"] in ("stop", "length"), (body, answer)
    narrow.check()
