"""The /v1 routes, asked by the official client; every reply must also validate against the client's own types."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from banyan.managers.chat_template import ChatTemplate
from banyan.managers.errors import EngineDeadError, RequestError
from banyan.managers.io_struct import FinishReason, unpack_ids

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20) as found:
        yield found


def typed(reply: Any) -> Any:
    """The client builds replies without a check; validate them."""
    return type(reply).model_validate(reply.to_dict())


def chunks_of(stream: Any) -> list[Any]:
    """All chunks. The client has no type of a completions chunk whose finish reason is still null, as it is on the wire."""
    chunks = list(stream)
    for chunk in chunks:
        body = chunk.to_dict()
        for choice in body["choices"]:
            if chunk.object == "text_completion" and choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"
        type(chunk).model_validate(body)
    return chunks


def text_by_index(chunks: list[Any], chat: bool) -> dict[int, str]:
    texts: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content or "") if chat else choice.text
    return dict(texts)


def post(served: Any, path: str, body: Any) -> httpx.Response:
    found: httpx.Response = served.client.post(path, json=body)
    return found


# --- models -----------------------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI, served: Any) -> None:
    (card,) = client.models.list().data
    assert typed(card).id == "small"
    assert client.models.retrieve("small").id == "small"
    assert served.client.get("/v1/models").json()["data"][0]["max_model_len"] == 200
    with pytest.raises(openai.NotFoundError) as info:
        client.models.retrieve("other/model")
    assert info.value.param == "model"


@pytest.mark.parametrize("name", ["small", "smollm2", "default", "", None])
def test_known_names(served: Any, name: str | None) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        reply = post(served, path, {**body, "model": name})
        assert reply.status_code == 200
        assert reply.json()["model"] == (name if name in ("small", "smollm2") else "small")


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_name_is_404(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as info:
        client.completions.create(model="gpt-9", prompt="a", stream=stream)
    assert (info.value.param, info.value.type) == ("model", "NotFoundError")


# --- completions ------------------------------------------------------------------------------------------------------------------


def test_completion(client: openai.OpenAI) -> None:
    reply = typed(client.completions.create(model="small", prompt="hi"))
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.matched_stop) == ("Hello world", "stop", 2)
    assert reply.id.startswith("cmpl-")
    assert reply.usage.prompt_tokens == 3
    assert reply.usage.total_tokens == 3 + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("prompt", ["hi", ["hi", "yo"], [104, 105], [[104, 105], [1]]])
def test_prompt_forms(client: openai.OpenAI, served: Any, prompt: Any) -> None:
    reply = typed(client.completions.create(model="small", prompt=prompt, n=2, max_tokens=1))
    num = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in reply.choices] == list(range(2 * num))
    assert {(choice.text, choice.finish_reason) for choice in reply.choices} == {("Hel", "length")}
    prompts = [unpack_ids(message.input_ids).tolist() for message in served.manager.seen]
    assert reply.usage.prompt_tokens == sum(map(len, prompts[::2]))
    assert reply.usage.completion_tokens == 2 * num


def test_sampling_fields_arrive(served: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "stop": "x",
        "stop_token_ids": [9],
        "min_tokens": 2,
        "max_tokens": 30,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "rid": "mine",
        "extra_key": "k",
        "cache_salt": "s",
        "priority": 3,
    }
    assert post(served, "/v1/completions", {"prompt": "a", **fields}).status_code == 200
    (message,) = served.manager.seen
    params = message.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.sampling_seed) == (0.5, 0.9, 5, 0.1, 7)
    assert (params.stop, params.stop_token_ids, params.min_new_tokens, params.max_new_tokens) == (["x"], [9], 2, 30)
    assert (params.ignore_eos, params.skip_special_tokens, params.no_stop_trim) == (True, False, True)
    assert (message.rid, message.extra_key, message.cache_salt, message.priority) == ("mine", "k", "s", 3)


def test_default_limits(served: Any) -> None:
    post(served, "/v1/completions", {"prompt": "a", "max_tokens": None})
    post(served, "/v1/chat/completions", {"messages": CHAT})
    post(served, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 5})
    post(served, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 6})
    room = 200 - len("<user>hi<assistant>")
    assert [message.sampling_params.max_new_tokens for message in served.manager.seen] == [16, room, 5, 6]


@pytest.mark.parametrize("prompt", ["hi", ["hi", "yo"], [1, 104, 105]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: openai.OpenAI, prompt: Any, stream: bool) -> None:
    reply = client.completions.create(model="small", prompt=prompt, echo=True, stream=stream)
    texts = text_by_index(chunks_of(reply), chat=False) if stream else {choice.index: choice.text for choice in reply.choices}
    wanted = ["hi", "yo"] if isinstance(prompt, list) and prompt[0] == "hi" else ["hi"]
    assert texts == {index: text + "Hello world" for index, text in enumerate(wanted)}


def test_stream_equals_whole_and_ends_each_index_once(client: openai.OpenAI) -> None:
    chunks = chunks_of(client.completions.create(model="small", prompt=["a", "b"], n=2, stream=True))
    assert text_by_index(chunks, chat=False) == dict.fromkeys(range(4), "Hello world")
    reasons = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(reasons) == [0, 1, 2, 3]
    assert all(chunk.choices for chunk in chunks)
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


@pytest.mark.parametrize("chat", [False, True])
def test_usage_in_streams(client: openai.OpenAI, chat: bool) -> None:
    def ask(**options: Any) -> list[Any]:
        if chat:
            return chunks_of(client.chat.completions.create(model="small", messages=CHAT, n=2, stream=True, **options))
        return chunks_of(client.completions.create(model="small", prompt="a", n=2, stream=True, **options))

    assert [chunk.usage for chunk in ask()] == [None] * len(ask())
    *chunks, last = ask(stream_options={"include_usage": True})
    assert (last.choices, {chunk.usage for chunk in chunks}) == ([], {None})
    assert last.usage.completion_tokens == 10
    assert last.usage.prompt_tokens_details.cached_tokens == 3
    running = ask(stream_options={"continuous_usage_stats": True})
    assert all(chunk.usage for chunk in running)
    assert running[-1].usage == last.usage


# --- chat -------------------------------------------------------------------------------------------------------------------------


def prompt_of(served: Any) -> str:
    return bytes(unpack_ids(served.manager.seen[-1].input_ids).tolist()).decode()


def test_chat(client: openai.OpenAI, served: Any) -> None:
    reply = typed(client.chat.completions.create(model="small", messages=CHAT, n=2))
    assert [choice.message.content for choice in reply.choices] == ["Hello world"] * 2
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 2
    assert reply.id.startswith("chatcmpl-")
    assert prompt_of(served) == "<user>hi<assistant>"


def test_message_forms(served: Any) -> None:
    messages = [
        {"role": "SYSTEM", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "short"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I w"},
    ]
    assert post(served, "/v1/chat/completions", {"messages": messages, "continue_final_message": True}).status_code == 200
    assert prompt_of(served) == "<system>be short<assistant><user>go<assistant>I w"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_say_what_the_string_says_whoever_speaks(served: Any, role: str) -> None:
    prompts = []
    for content in (
        "so it is",
        [{"type": "text", "text": "so it is"}],
        [{"type": "text", "text": "so it"}, {"type": "text", "text": "is"}],
    ):
        message = {"role": role, "content": content, **({"tool_call_id": "c"} if role == "tool" else {})}
        assert post(served, "/v1/chat/completions", {"messages": [*CHAT, message, *CHAT]}).status_code == 200
        prompts.append(prompt_of(served))
    assert "so it is" in prompts[0]
    assert prompts == [prompts[0]] * 3
    for wrong in ([{"type": "video", "text": "x"}], [{"type": "text"}], ["x"]):
        reply = post(served, "/v1/chat/completions", {"messages": [{"role": role, "content": wrong}]})
        assert (reply.status_code, reply.json()["param"]) == (400, "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_template_raises_is_told(served: Any, stream: bool) -> None:
    served.manager.tokenizer.chat_templates = {"default": "{{ raise_exception('System role not supported') }}"}
    served.state.attach(served.manager)
    reply = post(served, "/v1/chat/completions", {"messages": CHAT, "stream": stream})
    assert (reply.status_code, reply.json()["param"]) == (400, "messages")
    assert "System role not supported" in reply.json()["message"]


def test_no_second_bos(served: Any) -> None:
    served.manager.tokenizer.chat_templates = {"default": "{{ bos_token }}{{ messages[0].content }}"}
    served.state.attach(served.manager)
    post(served, "/v1/chat/completions", {"messages": CHAT})
    assert prompt_of(served) == "\x01hi"


def test_model_without_template(served: Any) -> None:
    served.manager.tokenizer.chat_templates = {}
    served.state.attach(served.manager)
    reply = post(served, "/v1/chat/completions", {"messages": CHAT})
    assert (reply.status_code, reply.json()["param"]) == (400, "messages")


def test_chat_stream_order(client: openai.OpenAI) -> None:
    chunks = chunks_of(client.chat.completions.create(model="small", messages=CHAT, n=3, stream=True))
    assert text_by_index(chunks, chat=True) == dict.fromkeys(range(3), "Hello world")
    for index in range(3):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert choices[-1].delta.content is None
        assert choices[-1].matched_stop == 2


def test_role_comes_even_with_an_empty_answer(client: openai.OpenAI, served: Any) -> None:
    served.manager.script = []
    chunks = chunks_of(client.chat.completions.create(model="small", messages=CHAT, stream=True))
    assert [(chunk.choices[0].delta.role, chunk.choices[0].finish_reason) for chunk in chunks] == [
        ("assistant", None),
        (None, "stop"),
    ]


def test_token_ids_on_demand(served: Any) -> None:
    choice = post(served, "/v1/chat/completions", {"messages": CHAT, "return_token_ids": True}).json()["choices"][0]
    assert choice["token_ids"] == [1, 2, 3, 4, 5]
    assert bytes(choice["prompt_token_ids"]).decode() == "<user>hi<assistant>"


# --- errors -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": "2"}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"min_tokens": 100_000}, "min_tokens"),
        ({"min_tokens": 100_000, "max_tokens": None}, "min_tokens"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"custom_params": {"x": [10**30]}}, "custom_params"),
        ({"max_thinking_tokens": 10**30}, "max_thinking_tokens"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stop_regex": "(a"}, "stop_regex"),
        ({"custom_logit_processor": "none"}, "custom_logit_processor"),
        ({"logprobs": "x"}, "logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"lora_path": "x"}, "lora_path"),
    ],
)
def test_bad_fields_are_400(served: Any, fields: dict[str, Any], param: str, stream: bool) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        reply = post(served, path, {**body, **fields, "stream": stream})
        assert reply.status_code == 400
        error = reply.json()
        assert error["object"] == "error"
        assert error["error"] == {key: error[key] for key in ("message", "type", "param", "code")}
        assert (error["param"], error["code"]) == (param, 400)
        assert "new_tokens" not in error["message"]
    assert served.manager.seen == []


@pytest.mark.parametrize(
    "fields",
    [
        {
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "logit_bias": {},
            "logprobs": None,
            "tools": [],
            "suffix": "",
            "user": "u",
        },
        {
            "logit_bias": None,
            "seed": None,
            "stop": None,
            "n": None,
            "temperature": None,
            "stream_options": None,
            "max_tokens": None,
        },
        {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True, "whatever": 1, "best_of": 1},
    ],
)
def test_harmless_values_pass(served: Any, fields: dict[str, Any]) -> None:
    assert post(served, "/v1/completions", {"prompt": "a", **fields}).status_code == 200
    assert post(served, "/v1/chat/completions", {"messages": CHAT, **fields}).status_code == 200


@pytest.mark.parametrize(
    "arguments",
    [r'{"a": "\ud800"}', r'{"\ud800": 1}', '{"a\\\\": ' + "[" * 700 + "]" * 700 + "}", '{"a": 1e999}', '{"a": NaN}', "9" * 5000],
)
def test_arguments_that_are_no_json_for_a_template_stay_text(served: Any, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    served.state.chat_template, kept = ChatTemplate(template, None, None), served.state.chat_template
    try:
        reply = post(served, "/tokenize", {"messages": messages})
    finally:
        served.state.chat_template = kept
    assert reply.status_code == 200, reply.text
    assert bytes(reply.json()["tokens"]).decode() == json.dumps(arguments)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1 << 70]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a" * 500}, "prompt"),
        ({"prompt": "a", "rid": ["a", "b"]}, "rid"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completions(served: Any, body: dict[str, Any], param: str, stream: bool) -> None:
    reply = post(served, "/v1/completions", {**body, "stream": stream})
    assert (reply.status_code, reply.json()["param"]) == (400, param)
    assert "conprompt" not in reply.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 500}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 9999}, "max_completion_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chats(served: Any, fields: dict[str, Any], param: str, stream: bool) -> None:
    reply = post(served, "/v1/chat/completions", {"messages": CHAT, **fields, "stream": stream})
    assert (reply.status_code, reply.json()["param"]) == (400, param)


def test_content_type_is_demanded(served: Any) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = served.client.post(path, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
        assert reply.status_code == 400
        assert "Content-Type" in reply.json()["message"]
    good = served.client.post(
        "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert good.status_code == 200


@pytest.mark.parametrize("chat", [False, True])
def test_error_after_the_first_byte(served: Any, client: openai.OpenAI, chat: bool) -> None:
    served.manager.fault = (2, EngineDeadError("it died"))
    path, body = ("/v1/chat/completions", {"messages": CHAT}) if chat else ("/v1/completions", {"prompt": "a"})
    text = post(served, path, {**body, "stream": True}).text
    assert "[DONE]" not in text
    assert '"code":503' in text.split("\n\n")[-2]
    with pytest.raises(openai.APIError, match="died"):
        if chat:
            list(client.chat.completions.create(model="small", messages=CHAT, stream=True))
        else:
            list(client.completions.create(model="small", prompt="a", stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_scheduler_has_its_status(served: Any, client: openai.OpenAI, stream: bool) -> None:
    served.manager.script = []
    served.manager.end = FinishReason(kind="abort", message="The request queue is full.", status_code=503, err_type="Overloaded")
    with pytest.raises(openai.InternalServerError) as info:
        client.completions.create(model="small", prompt="a", stream=stream)
    assert (info.value.status_code, info.value.type) == (503, "Overloaded")
    assert info.value.response.headers["retry-after"]


def test_an_abort_by_the_client_is_an_ordinary_end(served: Any) -> None:
    served.manager.end = FinishReason(kind="abort", message="Aborted.")
    reply = post(served, "/v1/completions", {"prompt": "a"})
    assert (reply.status_code, reply.json()["choices"][0]["finish_reason"]) == (200, "abort")


def test_unforeseen_error_in_a_stream_is_sanitised(served: Any) -> None:
    served.manager.fault = (1, RuntimeError("secret at 0x7f00deadbeef"))
    text = post(served, "/v1/completions", {"prompt": "a", "stream": True}).text
    assert "secret" not in text
    assert "Internal server error." in text


def test_engine_errors_before_the_first_byte(served: Any) -> None:
    served.manager.fault = (0, RequestError("no", param="prompt", status_code=400))
    reply = post(served, "/v1/completions", {"prompt": "a", "stream": True})
    assert (reply.status_code, reply.json()["param"]) == (400, "prompt")
