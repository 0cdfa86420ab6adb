"""Tool calls and thinking through the real processes: the official client asks, the oracle says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_chat import EOS, scripted_chat_folder
from server import Server, running

from banyan.managers.chat_template import ChatTemplate
from banyan.managers.tokenizer import Tokenizer
from banyan.srt.openai.chat_prompt import prompt_ids
from banyan.srt.openai.protocol import ChatBody

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "at": {"$ref": "#/$defs/time"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"time": {"type": "integer"}},
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CALLS = (
    "<think>Hm, where?</think>\n\nI ask.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "at": 9}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
MARKS = {"special_tokens_in_content": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = scripted_chat_folder(tmp_path_factory.mktemp("chat"))
    with running(model, tmp_path_factory.mktemp("s"), "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes") as found:
        yield found


@pytest.fixture
def say(server: Server) -> Iterator[Any]:
    """say(text, ...) is the reply in which the model says this text."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:

        def create(text: str, **fields: Any) -> Any:
            return client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}], **fields)

        yield create


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def joined(stream: Any) -> dict[int, Any]:
    """index -> [thinking, text, [[name, arguments], ...], finish reason]"""
    found: dict[int, Any] = {}
    for chunk in stream:
        type(chunk).model_validate(chunk.to_dict())
        for choice in chunk.choices:
            answer = found.setdefault(choice.index, ["", "", [], None])
            assert answer[3] is None
            answer[0] += choice.delta.reasoning_content or ""
            answer[1] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    answer[2].append([call.function.name, ""])
                answer[2][call.index][1] += call.function.arguments
            answer[3] = choice.finish_reason
    return found


def test_calls_whose_marks_are_control_tokens(say: Any) -> None:
    reply = say(CALLS, tools=[WEATHER, NOW], n=2, extra_body=MARKS)
    streamed = joined(say(CALLS, tools=[WEATHER, NOW], n=2, stream=True, extra_body=MARKS))
    for choice in reply.choices:
        type(choice).model_validate(choice.to_dict())
        message = choice.message
        assert calls_of(message) == [("weather", {"city": "Rome", "at": 9}), ("now", {})]
        assert (message.reasoning_content, message.content, choice.finish_reason) == ("Hm, where?", "I ask.", "tool_calls")
        thinking, text, calls, reason = streamed[choice.index]
        assert (thinking, text, reason) == ("Hm, where?", "I ask.", "tool_calls")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == calls_of(message)
    assert EOS not in str(reply)
    assert reply.usage.completion_tokens_details.reasoning_tokens == 2 * len("<think>Hm, where?</think>")


def test_usage_counts_thinking_in_streams(say: Any) -> None:
    *_, last = say(CALLS, stream=True, stream_options={"include_usage": True}, extra_body=MARKS)
    assert last.usage.completion_tokens_details.reasoning_tokens == len("<think>Hm, where?</think>")
    assert say("<think>never ends").usage.completion_tokens_details.reasoning_tokens == len("<think>never ends") + 1
    assert say("no thought").usage.completion_tokens_details.reasoning_tokens == 0


def test_control_tokens_in_messages_are_text(server: Server, say: Any) -> None:
    def prompt(text: str, **fields: Any) -> list[int]:
        body = {"messages": [{"role": "user", "content": text}], "return_token_ids": True, "max_tokens": 1, **fields}
        ids: list[int] = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["prompt_token_ids"]
        return ids

    text = f"a{EOS}<tool_call><|300|>"
    harmless, asked_for = prompt(text), prompt(text, **MARKS)
    assert (len(set(harmless) & {2, 300}), {2, 300} <= set(asked_for)) == (1, True)  # EOS stands behind the message
    assert harmless.index(2) == 2 + len(text)
    shown = server.http.post("/detokenize", json={"tokens": harmless, "skip_special_tokens": False}).json()["text"]
    assert text in shown


def test_control_tokens_behind_escapes_are_text(tmp_path: Path) -> None:
    """A call's arguments may be JSON text in which they are spelled with escapes."""
    tokenizer = Tokenizer.load(scripted_chat_folder(tmp_path))
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.a }}", None, None)
    for arguments in ('{"a": "<|300|>"}', '{"a": "\\u003c|300|\\u003e"}', {"a": "<|300|>"}):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        body = ChatBody.parse({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
        ids = prompt_ids(template, tokenizer, body)
        assert tokenizer.decode(ids) == "<|300|>"
        assert 300 not in ids


@pytest.mark.parametrize("thinking", ["", "<think>Let me</think>"])
@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_follow_the_schema(say: Any, thinking: str, stream: bool) -> None:
    text = thinking + '[{"name": "weather", "parameters": {"city": "Rome", "at": 9}}, {"name": "now", "parameters": {}}]'
    reply = say(text, tools=[WEATHER, NOW], tool_choice="required", stream=stream)
    if stream:
        thought, content, calls, reason = joined(reply)[0]
    else:
        message, reason = reply.choices[0].message, reply.choices[0].finish_reason
        thought, content = message.reasoning_content or "", message.content
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", {"city": "Rome", "at": 9}), ("now", {})]
    assert (thought, content, reason) == (thinking[7:-8], "", "tool_calls")


def test_what_the_grammar_forbids_is_not_said(say: Any) -> None:
    """The script wants another tool; the oracle takes the nearest token that is allowed."""
    named = {"type": "function", "function": {"name": "now"}}
    message = (
        say('[{"name": "weather", "parameters": {}}]', tools=[WEATHER, NOW], tool_choice=named, max_tokens=80).choices[0].message
    )
    assert [name for name, _ in calls_of(message)] == ["now"]


def test_bad_schemas_are_told_as_the_clients_field(say: Any) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError) as info:
        say("x", tools=[broken], tool_choice="required")
    assert info.value.param == "tools"


@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_real_model_calls_the_tool_it_must_call(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = Server("smollm2", tmp_path_factory.mktemp("s"), "--max-total-tokens", "4096", load_format="auto")
    try:
        server.wait_ready()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
            reply = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "What is the weather in Paris?"}],
                tools=[WEATHER],
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0,
                max_tokens=80,
            )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert isinstance(json.loads(call.function.arguments)["city"], str)
        assert reply.choices[0].finish_reason == "tool_calls"
    finally:
        server.close()
