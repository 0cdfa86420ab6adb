"""Tools and thinking on /v1/chat/completions, asked by the official client; the model's words are a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from banyan.managers.io_struct import unpack_ids

CHAT = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ANSWER = [
    "<th",
    "ink>Let me",
    " see.\n</thi",
    "nk>\n\nI look",
    " it up.\n<tool",
    '_call>\n{"name": "weather", "argu',
    'ments": {"city": "Pa',
    'ris"}}\n</tool_call>\n<tool_call>\n{"name": "now"}',
    "\n</tool_call>",
]
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    "{% if enable_thinking is defined %}{think={{ enable_thinking }}}{% endif %}"
    "{% if reasoning_effort is defined %}{effort={{ reasoning_effort }}}{% endif %}"
)


@pytest.fixture
def chat(served: Any) -> Iterator[Any]:
    """The client's create, at a server with both parsers."""
    manager = served.manager
    manager.config = msgspec.structs.replace(manager.config, tool_call_parser="hermes", reasoning_parser="qwen3")
    manager.validator = type(manager.validator)(manager.config, manager.info, manager.tokenizer)
    manager.tokenizer.chat_templates = {"default": TEMPLATE}
    served.state.attach(manager)
    manager.script = ANSWER
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:

        def create(**fields: Any) -> Any:
            return client.chat.completions.create(**{"model": "small", "messages": CHAT, **fields})

        yield create


def prompt_of(served: Any) -> str:
    return bytes(unpack_ids(served.manager.seen[-1].input_ids).tolist()).decode()


def read_stream(chunks: Any) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream, per index, with the rules of the wire format checked on the way."""
    answers: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "reason": None, "roles": 0})
            assert answer["reason"] is None, "nothing comes behind the finish reason"
            delta = choice.delta
            answer["roles"] += delta.role is not None
            answer["content"] += delta.content or ""
            answer["reasoning"] += delta.reasoning_content or ""
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(answer["calls"])
                    answer["calls"].append([call.function.name, ""])
                else:
                    assert call.function.name is None
                answer["calls"][call.index][1] += call.function.arguments
            answer["reason"] = choice.finish_reason
    return answers


CALLS = [("weather", {"city": "Paris"}), ("now", {})]


@pytest.mark.parametrize("n", [1, 3])
def test_calls_and_thinking(chat: Any, n: int) -> None:
    reply = chat(tools=[WEATHER, NOW], n=n)
    type(reply).model_validate(reply.to_dict())
    streamed = read_stream(chat(tools=[WEATHER, NOW], n=n, stream=True))
    assert set(streamed) == set(range(n))
    for choice in reply.choices:
        message, answer = choice.message, streamed[choice.index]
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        assert calls == CALLS == [(name, json.loads(text)) for name, text in answer["calls"]]
        assert (message.reasoning_content, answer["reasoning"]) == ("Let me see.",) * 2
        assert (message.content, answer["content"]) == ("I look it up.",) * 2
        assert (choice.finish_reason, answer["reason"], answer["roles"]) == ("tool_calls", "tool_calls", 1)
        assert choice.matched_stop is None
        assert len({call.id for call in message.tool_calls}) == 2
        assert all(call.id.startswith("call_") and len(call.id) == 29 for call in message.tool_calls)


def test_an_answer_that_is_cut_off_says_so(chat: Any) -> None:
    for stream in (False, True):
        reply = chat(tools=[WEATHER], max_tokens=7, stream=stream)
        if stream:
            answer = read_stream(reply)[0]
            assert (answer["reason"], answer["calls"]) == ("length", [["weather", '{"city": "Pa']])
        else:
            assert reply.choices[0].finish_reason == "length"
            assert reply.choices[0].message.tool_calls[0].function.arguments == '{"city": "Pa'


def test_one_call_alone(chat: Any) -> None:
    calls = chat(tools=[WEATHER, NOW], parallel_tool_calls=False).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather"]
    streamed = read_stream(chat(tools=[WEATHER, NOW], parallel_tool_calls=False, stream=True))
    assert [name for name, _ in streamed[0]["calls"]] == ["weather"]


def test_a_tool_that_was_not_offered_is_text(chat: Any) -> None:
    message = chat(tools=[NOW]).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["now"]
    assert '"weather"' in message.content


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER, NOW], "tool_choice": "none"}])
def test_without_tools_calls_are_text(chat: Any, served: Any, fields: dict[str, Any]) -> None:
    choice = chat(**fields).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "<tool_call>" in choice.message.content
    assert "[weather]" not in prompt_of(served)


def test_tools_reach_the_template(chat: Any, served: Any) -> None:
    chat(tools=[WEATHER, NOW])
    assert prompt_of(served).startswith("[weather][now]<user>hi")


def test_thinking_stays_in_the_text_if_it_is_not_to_be_separated(chat: Any) -> None:
    reply = chat(extra_body={"separate_reasoning": False})
    assert reply.choices[0].message.content.startswith("<think>Let me see.")
    assert reply.choices[0].message.reasoning_content is None


def test_thinking_may_come_in_one_piece(chat: Any) -> None:
    def pieces(**fields: Any) -> list[str]:
        chunks = chat(stream=True, extra_body=fields)
        return [text for chunk in chunks for choice in chunk.choices if (text := choice.delta.reasoning_content)]

    assert pieces(stream_reasoning=False) == ["Let me see."]
    assert "".join(pieces()) == "Let me see."


def test_effort_and_switches_reach_the_template(chat: Any, served: Any) -> None:
    for fields, wanted in (
        ({}, ""),
        ({"reasoning_effort": "high"}, "{think=True}{effort=high}"),
        ({"reasoning_effort": "none"}, "{think=False}"),
        ({"reasoning_effort": 0.5}, "{think=True}{effort=0.5}"),
        ({"reasoning": {"enabled": False}}, "{think=False}"),
        ({"reasoning": {"effort": "low"}}, "{think=True}{effort=low}"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, "{think=False}{effort=high}"),
    ):
        chat(extra_body=fields)
        assert prompt_of(served) == "<user>hi" + wanted


def test_a_conversation_with_calls(chat: Any, served: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "w?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
    ]
    chat(messages=messages, tools=[WEATHER])
    assert prompt_of(served) == '[weather]<system>Be brief.<user>w?<assistant>(weather {"city": "Zürich"})<tool>sun'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [NOW]}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [NOW]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [NOW], "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [NOW], "extra_body": {"regex": "a"}}, "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [NOW] * 300}, "tools"),
        ({"reasoning_effort": "hardest"}, "reasoning_effort"),
        (
            {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages[1].tool_calls[0]",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields(chat: Any, served: Any, fields: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        chat(**fields, stream=stream)
    assert info.value.param == param
    assert served.manager.seen == []


def test_auto_needs_a_format(chat: Any, served: Any) -> None:
    manager = served.manager
    manager.config = msgspec.structs.replace(manager.config, tool_call_parser=None)
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        chat(tools=[NOW])
    manager.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> #}"}
    served.state.attach(manager)
    assert chat(tools=[NOW, WEATHER]).choices[0].message.tool_calls


def test_choices_become_grammars(chat: Any, served: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    served.manager.script = ['[{"name": "weather", "parameters": {"city": "Rome"}}', "]"]
    for fields, names, most in (
        ({"tool_choice": "required"}, ["weather", "now"], None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "now"], 1),
        ({"tool_choice": named}, ["weather"], 1),
    ):
        reply = chat(tools=[WEATHER, NOW], **fields)
        (call,) = reply.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        assert reply.choices[0].finish_reason == "tool_calls"
        schema = json.loads(served.manager.seen[-1].sampling_params.json_schema)
        items = schema["items"].get("anyOf", [schema["items"]])
        assert [item["properties"]["name"]["const"] for item in items] == names
        assert (schema["minItems"], schema.get("maxItems")) == (1, most)


def test_strict_tools_are_a_structural_tag_where_the_format_is_text(chat: Any, served: Any) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    chat(tools=[strict])
    tag = json.loads(served.manager.seen[-1].sampling_params.structural_tag)
    assert tag["format"]["tags"][0]["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
    reply = served.client.post("/v1/chat/completions", json={"messages": CHAT, "tools": [strict]})
    assert "warning" not in reply.headers
    served.manager.config = msgspec.structs.replace(served.manager.config, tool_call_parser="kimi_k2")
    reply = served.client.post("/v1/chat/completions", json={"messages": CHAT, "tools": [strict]})
    assert "strict is not enforced" in reply.headers["warning"]


@pytest.mark.parametrize(
    ("parser", "pieces"),
    [
        ("qwen3_coder", ["<tool_call><function=wea", "ther><parameter=city>\nPa", "ris\n</parameter></function></tool_call>"]),
        ("glm45", ["<tool_call>weather\n<arg_key>city</arg_key><arg_va", "lue>Paris</arg_value></tool_call>"]),
        ("llama3", ['<|python_tag|>{"name": "weather", "param', 'eters": {"city": "Paris"}}']),
        ("mistral", ["[TOOL_CA", 'LLS]weather[ARGS]{"city": "Par', 'is"}']),
        (
            "deepseekv3",
            ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json", '\n{"city": "Paris"}\n```'],
        ),
        ("deepseekv31", ['<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Pa', 'ris"}<｜tool▁call▁end｜>']),
        ("kimi_k2", ["<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>", '{"city": "Paris"}<|tool_call_end|>']),
        ("gpt-oss", ["<|channel|>commentary to=functions.wea", 'ther<|message|>{"city": "Paris"}<|call|>']),
        ("apertus2509", ['<|tools_prefix|>[{"weather": {"city": "Pa', 'ris"}}]<|tools_suffix|>']),
        ("gemma4", ['<|tool_call>call:weather{city:<|"', '|>Paris<|"|>}<tool_call|>']),
        (
            "minimax-m3",
            [
                ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<ci',
                "ty>Paris]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
            ],
        ),
        (
            "kimi_k3",
            [
                '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>P',
                "aris<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
            ],
        ),
        ("pythonic", ["[weather(city=", "'Paris')]"]),
        ("json", ['[{"name": "weather", ', '"parameters": {"city": "Paris"}}]']),
    ],
)
def test_every_format_on_the_wire(chat: Any, served: Any, parser: str, pieces: list[str]) -> None:
    served.manager.config = msgspec.structs.replace(served.manager.config, tool_call_parser=parser)
    served.manager.script = pieces
    (call,) = chat(tools=[WEATHER]).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    own_ids = {"kimi_k2": "functions.weather:0", "kimi_k3": "weather:1"}
    assert call.id.startswith("call_") if parser not in own_ids else call.id == own_ids[parser]
    answer = read_stream(chat(tools=[WEATHER], stream=True))[0]
    assert [(name, json.loads(text)) for name, text in answer["calls"]] == [("weather", {"city": "Paris"})]
    assert (answer["content"], answer["reason"]) == ("", "tool_calls")


def test_a_template_that_shows_no_tools_is_told(chat: Any, served: Any) -> None:
    body = {"messages": CHAT, "tools": [NOW]}
    assert "warning" not in served.client.post("/v1/chat/completions", json=body).headers
    served.manager.tokenizer.chat_templates = {"default": "{{ messages[0].content }}"}
    served.state.attach(served.manager)
    assert "does not show the tools" in served.client.post("/v1/chat/completions", json=body).headers["warning"]


# --- native routes ----------------------------------------------------------------------------------------------------------------


def test_parse_function_call(served: Any) -> None:
    text = 'x <tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
    body = {"text": text, "tools": [NOW], "tool_call_parser": "qwen25"}
    assert served.client.post("/parse_function_call", json=body).json() == {
        "normal_text": "x",
        "calls": [{"tool_index": 0, "name": "now", "parameters": '{"a": 1}'}],
    }
    reply = served.client.post("/parse_function_call", json={"text": text, "tool_call_parser": "none"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_call_parser")


def test_separate_reasoning(served: Any) -> None:
    body = {"text": "<think>a</think>b", "reasoning_parser": "qwen3"}
    assert served.client.post("/separate_reasoning", json=body).json() == {"reasoning_text": "a", "text": "b"}
    reply = served.client.post("/separate_reasoning", json={"text": "a"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning_parser")


def nested(depth: int, leaf: Any) -> Any:
    value = leaf
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [60, 99, 300, 600])
def test_deep_nesting_is_refused(chat: Any, served: Any, depth: int) -> None:
    schema = {"type": "object", "properties": nested(depth, {"type": "string"})}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = {"type": "function", "function": {"name": "f", "arguments": nested(depth, 1)}}
    served.manager.tokenizer.chat_templates = {"default": "{% for t in tools or [] %}{% endfor %}x"}
    served.state.attach(served.manager)
    for body in (
        {"messages": CHAT, "tools": [tool]},
        {"messages": CHAT, "tools": [tool], "tool_choice": "required"},
        {"messages": [*CHAT, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [{**CHAT[0], "extra": nested(depth, 1)}]},
        {"messages": CHAT, "chat_template_kwargs": nested(depth, 1)},
    ):
        reply = served.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == (200 if depth < 70 else 400) or depth == 99, (list(body), reply.text[:200])
        assert reply.status_code == 200 or "nested" in reply.json()["message"]
