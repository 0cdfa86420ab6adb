"""The official client against the real server: every feature of the routes, and the right exception for each error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from harness import EOS, SCRIPT, VOCAB
from server import Server, answer_of, running

KEY, ADMIN_KEY = "key-of-users", "key-of-admins"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CHAT: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}
FULL: Any = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openai")
    (folder / "chat.jinja").write_text(TEMPLATE)
    options = ["--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--served-model-name", "tiny"]
    with running(model, folder, *options, "--chat-template", str(folder / "chat.jinja"), "--context-length", "1024") as server:
        server.http.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        yield server


def connect(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[openai.OpenAI]:
    with connect(served, KEY) as found:
        yield found


def script(*ids: int) -> list[int]:
    """A prompt whose completion is these tokens."""
    return [SCRIPT, len(ids), *ids]


def chat_text(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


# --- features


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list()
    assert (card.id, client.models.retrieve("tiny").id, card.owned_by) == ("tiny", "tiny", "sglang")


def test_a_prompt_in_every_form_and_a_batch(client: openai.OpenAI) -> None:
    text = "the quick brown"
    one = client.completions.create(prompt=text, **GREEDY, extra_body={**FULL, "return_token_ids": True})
    ids = one.choices[0].model_extra["prompt_token_ids"]
    assert len(one.choices[0].model_extra["token_ids"]) == one.usage.completion_tokens == 6
    by_ids = client.completions.create(prompt=ids, **GREEDY, extra_body=FULL)
    assert by_ids.choices[0].text == one.choices[0].text
    batch = client.completions.create(prompt=[ids, ids[:2]], n=2, **GREEDY, extra_body=FULL)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in batch.choices[:2]] == [one.choices[0].text] * 2
    assert batch.usage.prompt_tokens == len(ids) + 2
    assert batch.usage.completion_tokens == 24
    assert one.id.startswith("cmpl-")
    assert (one.object, one.model) == ("text_completion", "tiny")


def test_cached_tokens(client: openai.OpenAI) -> None:
    prompt = list(range(50, 90))
    for cached in (0, 39):
        found = client.completions.create(prompt=prompt, **GREEDY, extra_body={"cache_salt": "once"})
        assert found.usage.prompt_tokens_details.cached_tokens == cached


@pytest.mark.parametrize("n", [1, 3])
def test_streams_say_the_same_as_answers(client: openai.OpenAI, n: int) -> None:
    options = {**GREEDY, "n": n, "seed": 3, "temperature": 1.0}
    extra = {**FULL, "return_token_ids": True}
    whole = client.completions.create(prompt="abc def", **options, extra_body=extra)
    chunks = list(
        client.completions.create(
            prompt="abc def", **options, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for choice in whole.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert [token for part in parts for token in part.model_extra["token_ids"]] == choice.model_extra["token_ids"]


def test_usage_on_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(prompt="abc", **GREEDY, extra_body=FULL, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CHAT, **GREEDY, extra_body=FULL)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason, whole.usage.completion_tokens) == ("assistant", "length", 6)
    assert whole.id.startswith("chatcmpl-")
    with client.chat.completions.create(messages=CHAT, **GREEDY, extra_body=FULL, stream=True) as stream:
        chunks = list(stream)
    assert chat_text(chunks) == choice.message.content
    assert [each.choices[0].delta.role for each in chunks if each.choices[0].delta.role] == ["assistant"]


def test_chat_token_ids(client: openai.OpenAI) -> None:
    extra = {**FULL, "return_token_ids": True}
    choice = client.chat.completions.create(messages=CHAT, **GREEDY, extra_body=extra).choices[0].model_extra
    chunks = list(client.chat.completions.create(messages=CHAT, **GREEDY, extra_body=extra, stream=True))
    parts = [each.model_extra for chunk in chunks for each in chunk.choices]
    assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [choice["prompt_token_ids"]]


@pytest.mark.parametrize("limits", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 9, "max_completion_tokens": 3}])
def test_both_names_of_the_limit(client: openai.OpenAI, limits: Any) -> None:
    found = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, extra_body=FULL, **limits)
    assert found.usage.completion_tokens == 3


@pytest.mark.parametrize("stop", ["c", ["zzz", "c"]])
def test_stop(client: openai.OpenAI, served: Server, stop: Any) -> None:
    ids = answer_of(served.post({"prompt": "abcd", "add_special_tokens": False}, "/v1/tokenize"))["tokens"]
    plain = client.completions.create(prompt=script(*ids), **GREEDY).choices[0]
    assert (plain.text, plain.finish_reason, plain.model_extra["matched_stop"]) == ("abcd", "stop", EOS)
    found = client.completions.create(prompt=script(*ids), stop=stop, **GREEDY).choices[0]
    assert (found.text, found.finish_reason, found.model_extra["matched_stop"]) == ("ab", "stop", "c")


def test_seed(client: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        options = {**GREEDY, "temperature": 1.0, "seed": seed}
        return client.completions.create(prompt="once", **options, extra_body=FULL).choices[0].text

    assert text(5) == text(5)
    assert text(None)


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(prompt="ab", echo=True, logprobs=2, **GREEDY, extra_body=FULL).choices
    assert choice.text.startswith("ab")
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == len(found.top_logprobs)
    assert found.token_logprobs[0] is None
    (chat,) = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY, extra_body=FULL).choices
    assert len(chat.logprobs.content) == 6
    assert {len(token.top_logprobs) for token in chat.logprobs.content} == {2}


@pytest.mark.parametrize(
    "schema", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}]
)
def test_response_format(client: openai.OpenAI, schema: Any) -> None:
    found = client.chat.completions.create(messages=CHAT, response_format=schema, **{**GREEDY, "max_tokens": 40})
    assert found.choices[0].message.content.lstrip()[0] in "{7"


def test_fields_that_change_nothing(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=CHAT, **GREEDY)
    more: Any = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    found = client.chat.completions.create(
        messages=CHAT, **GREEDY, **more, extra_body={"unknown_field": 1, "safety_identifier": "x"}
    )
    assert found.choices[0].message.content == plain.choices[0].message.content
    best = client.completions.create(prompt="a", best_of=1, suffix="", **GREEDY)
    assert best.choices[0].text == client.completions.create(prompt="a", **GREEDY).choices[0].text


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    messages: Any = [*CHAT, {"role": "assistant", "content": "so"}]
    assert client.chat.completions.create(messages=messages, **GREEDY, extra_body=extra).choices[0].message.role == "assistant"


# --- errors


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 100_000}, "max_tokens"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"seed": "x"}, "seed"),
    ({"stream_options": 5, "stream": True}, "stream_options"),
    ({"extra_body": {"response_format": {"type": "json_schema"}}}, "response_format"),
    ({"extra_body": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}}, "response_format"),
    ({"extra_body": {"lora_path": "x"}}, "lora_path"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool) -> None:
    options = {"model": "tiny", "max_tokens": 4, "stream": stream, **fields}
    for call in (
        lambda: client.completions.create(prompt="a", **options),
        lambda: client.chat.completions.create(messages=CHAT, **options),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.param == param
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["code"] == 400


def test_what_only_completions_refuse(client: openai.OpenAI) -> None:
    for fields, param in (({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"), ({"logprobs": 100}, "logprobs")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt="a", **GREEDY, **fields)
        assert caught.value.param == param
    for prompt in ("", [], [[]], [VOCAB], [-1], list(range(3)) * 1000):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt=prompt, stream=True, **GREEDY)
        assert caught.value.param == "prompt"


def test_unknown_models(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.models.retrieve("gpt-4"),
        lambda: client.completions.create(model="gpt-4", prompt="a"),
        lambda: client.chat.completions.create(model="gpt-4", messages=CHAT, stream=True),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.param == "model"


def test_keys(served: Server, client: openai.OpenAI) -> None:
    with connect(served, "wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(messages=CHAT, **GREEDY)
    flush = f"{served.url}/flush_cache"
    with pytest.raises(openai.PermissionDeniedError):
        client.post(flush, cast_to=httpx.Response)
    with connect(served, ADMIN_KEY) as admin:
        assert admin.post(flush, cast_to=httpx.Response).status_code == 200
        assert admin.models.list().data[0].id == "tiny"


def test_shapes_of_errors(served: Server) -> None:
    for path, body, status in (
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
        ("/v1/completions", {"prompt": "x" * (65 << 20)}, 413),
    ):
        reply = served.http.post(path, json=body)
        assert reply.status_code == status
        told = reply.json()
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert {name: told[name] for name in told["error"]} == told["error"]
        assert told["object"] == "error"


def test_health_needs_no_key(served: Server) -> None:
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert httpx.get(f"{served.url}/v1/models").status_code == 401
