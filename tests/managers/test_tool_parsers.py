"""Tool calls in text: every format, cut at any place, in linear time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.tool_parsers.events import CallArguments, CallStart, Event, Parsed, Text, collected
from banyan.managers.tool_parsers.registry import TOOL_PARSERS, create_parser
from banyan.managers.tool_parsers.xtml import KimiK3

CITY = {"type": "string"}
TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}, "deep": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}
WEATHER: dict[str, Any] = {"city": 'Zürich "old" <town>\n2', "days": 3}
DEEP: dict[str, Any] = {"city": "a", "deep": {"x": [1, None, True, {"y": "}]"}]}}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", WEATHER), ("now", {}), ("get_weather", DEEP)]


def tagged(calls: Any) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def coder(calls: Any) -> str:
    def value(item: Any) -> str:
        return item if isinstance(item, str) else json.dumps(item)

    def one(name: str, arguments: dict[str, Any]) -> str:
        parameters = "".join(f"<parameter={key}>\n{value(item)}\n</parameter>\n" for key, item in arguments.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def minimax(calls: Any) -> str:
    text = coder(calls).replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    for old, new in (("<function=", '<invoke name="'), ("<parameter=", '<parameter name="'), ("</function>", "</invoke>")):
        text = text.replace(old, new)
    for name in ("get_weather", "now", "city", "days", "deep"):
        text = text.replace(f'="{name}>', f'="{name}">')
    return f"<minimax:tool_call>\n{text}\n</minimax:tool_call>"


def glm(calls: Any) -> str:
    def value(item: Any) -> str:
        return item if isinstance(item, str) else json.dumps(item)

    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value(item)}</arg_value>\n" for key, item in arguments.items())
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def llama(calls: Any) -> str:
    return "<|python_tag|>" + "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def plain(calls: Any) -> str:
    return json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])


def mistral(calls: Any) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_names(calls: Any) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def deepseek(calls: Any) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek31(calls: Any) -> str:
    texts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def kimi(calls: Any) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def harmony(calls: Any) -> str:
    texts = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(texts)


def python(calls: Any) -> str:
    texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]
    return f"[{', '.join(texts)}]"


def minicpm(calls: Any) -> str:
    text = minimax(calls).replace("<minimax:tool_call>\n", "").replace("\n</minimax:tool_call>", "").replace("\n", "")
    text = text.replace("<invoke", "<function").replace("</invoke", "</function")
    return text.replace("<parameter", "<param").replace("</parameter", "</param").replace("<town>2", "<town>\n2")


def hunyuan(calls: Any) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        (text,) = [glm([(name, arguments)])]
        return text.replace(f"<tool_call>{name}\n", f"<tool_call>{name}<tool_sep>\n", 1)

    return f"<tool_calls>\n{chr(10).join(one(*call) for call in calls)}\n</tool_calls>"


def invoked(opening: str, closing: str, *, prefix: str, wrapper: tuple[str, str], told: bool) -> Any:
    def write(calls: Any) -> str:
        texts = []
        for name, arguments in calls:
            text = ""
            for key, item in arguments.items():
                kind = f' string="{str(isinstance(item, str)).lower()}"' if told else ""
                value = item if isinstance(item, str) else json.dumps(item)
                text += f'<{prefix}parameter name="{key}"{kind}>{value}</{prefix}parameter>\n'
            texts.append(f'{opening}<{prefix}invoke name="{name}">\n{text}</{prefix}invoke>{closing}')
        return wrapper[0] + "\n" + "\n".join(texts) + "\n" + wrapper[1]

    return write


def dsml(word: str) -> Any:
    return invoked("", "", prefix="｜DSML｜", wrapper=(f"<｜DSML｜{word}>", f"</｜DSML｜{word}>"), told=True)


STEP3 = invoked(
    "<｜tool_call_begin｜>function<｜tool_sep｜>",
    "<｜tool_call_end｜>",
    prefix="steptml:",
    wrapper=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    told=False,
)


def lfm(calls: Any) -> str:
    return f"<|tool_call_start|>{python(calls)}<|tool_call_end|>"


def interns(calls: Any) -> str:
    texts = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    return "".join(f"<|action_start|> <|plugin|>\n{text}<|action_end|>" for text in texts)


def cohere(calls: Any) -> str:
    texts = [{"tool_call_id": str(i), "tool_name": name, "parameters": values} for i, (name, values) in enumerate(calls)]
    return f"<|START_ACTION|>{json.dumps(texts)}<|END_ACTION|>"


def gigachat(calls: Any) -> str:
    return "".join("<|function_call|>" + json.dumps({"name": name, "arguments": values}) for name, values in calls)


def apertus(calls: Any) -> str:
    return f"<|tools_prefix|>{json.dumps([{name: values} for name, values in calls])}<|tools_suffix|>"


def gemma(calls: Any) -> str:
    def write(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)

    return "".join(f"<|tool_call>call:{name}{write(values)}<tool_call|>" for name, values in calls)


def minimax3(calls: Any) -> str:
    mark = "]<]minimax[>["

    def write(name: str, value: Any) -> str:
        if isinstance(value, dict):
            inner = "".join(write(key, each) for key, each in value.items())
        elif isinstance(value, list):
            inner = "".join(write("item", each) for each in value)
        else:
            inner = value if isinstance(value, str) else json.dumps(value)
        return f"{mark}<{name}>{inner}{mark}</{name}>"

    texts = [
        f'{mark}<invoke name="{name}">{"".join(write(key, each) for key, each in values.items())}{mark}</invoke>\n'
        for name, values in calls
    ]
    return f"{mark}<tool_call>\n{''.join(texts)}{mark}</tool_call>"


def kimi3(calls: Any) -> str:
    kinds = {str: "string", int: "number", dict: "object"}

    def argument(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{text}<|close|>argument<|sep|>'

    texts = [
        f'<|open|>call tool="{name}" index="{at}"<|sep|>{"".join(argument(*pair) for pair in values.items())}<|close|>call<|sep|>'
        for at, (name, values) in enumerate(calls, 1)
    ]
    return f"<|open|>tools<|sep|>{''.join(texts)}<|close|>tools<|sep|><|close|>message<|sep|>"


FORMATS: dict[str, Any] = {
    "apertus2509": apertus,
    "gemma4": gemma,
    "minimax-m3": minimax3,
    "kimi_k3": kimi3,
    "minicpm5": minicpm,
    "hunyuan": hunyuan,
    "deepseekv32": dsml("function_calls"),
    "deepseekv4": dsml("tool_calls"),
    "step3": STEP3,
    "lfm2": lfm,
    "interns1": interns,
    "cohere_command4": cohere,
    "gigachat3": gigachat,
    "hermes": tagged,
    "qwen25": tagged,
    "qwen3_coder": coder,
    "minimax-m2": minimax,
    "glm45": glm,
    "llama3": llama,
    "json": plain,
    "mistral": mistral,
    "deepseekv3": deepseek,
    "deepseekv31": deepseek31,
    "kimi_k2": kimi,
    "gpt-oss": harmony,
    "pythonic": python,
}
MARKS = sorted({mark for parser in TOOL_PARSERS.values() for mark in (*parser.markers, *parser.starts)})
BITS = [
    *MARKS,
    "<function=get_weather>",
    "<parameter=city>",
    "</parameter>",
    "</function>",
    "<｜tool▁sep｜>",
    "```json",
    "get_weather",
    "(city='",
    '{"name": "now"',
    '"arguments": ',
    '"parameters"',
    "functions.now:0",
    "call:now{",
    '<invoke name="now">',
    "<city>",
    "</city>",
    'call tool="get_weather" index="1"<|sep|>',
    'argument key="city" type="string"<|sep|>',
    "argument<|sep|>",
    "call<|sep|>",
    "tools<|sep|>",
    *'{}[]()"\\\n ,:;=<>x1',
]


def parse(name: str, pieces: list[str], tools: Any = TOOLS) -> tuple[Parsed, list[Event], Any]:
    parser = create_parser(name, tools)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return collected(events), events, parser


def cut(text: str, seed: int) -> list[str]:
    random_source = random.Random(seed)
    pieces = []
    while text:
        size = random_source.choice([1, 1, 2, 3, 7, 40])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def told(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found_and_told_once(name: str) -> None:
    text = FORMATS[name](CALLS)
    for pieces in ([text], list(text), cut(text, 3)):
        parsed, events, _ = parse(name, pieces)
        assert told(parsed) == CALLS
        assert [call.index for call in parsed.calls] == [0, 1, 2]
        assert parsed.text == ""
        starts = [event for event in events if isinstance(event, CallStart)]
        assert [event.index for event in starts] == [0, 1, 2]
        order = [event.index for event in events if isinstance(event, CallStart | CallArguments)]
        assert order == sorted(order)


def test_mistral_has_a_second_form() -> None:
    assert told(parse("mistral", list(mistral_names(CALLS)))[0]) == CALLS
    (call,) = parse("mistral", ['[TOOL_CALLS]now[CALL_ID]abc123[ARGS]{"a": 1}'])[0].calls
    assert (call.name, call.call_id, call.arguments) == ("now", "abc123", '{"a": 1}')


def test_kimi_ids_are_kept() -> None:
    assert [call.call_id for call in parse("kimi_k2", [kimi(CALLS)])[0].calls] == [
        "functions.get_weather:0",
        "functions.now:1",
        "functions.get_weather:2",
    ]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("json", "gpt-oss")])
def test_text_before_and_behind_calls(name: str) -> None:
    text = "Let me see.\n\n" + FORMATS[name](CALLS[:1]) + "\n  Done, [1] {x} <b>."
    for pieces in ([text], list(text)):
        parsed, _, _ = parse(name, pieces)
        assert told(parsed) == CALLS[:1]
        assert parsed.text == "Let me see.\n\nDone, [1] {x} <b>."


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_stream_before_the_call_ends(name: str) -> None:
    text = FORMATS[name]([("get_weather", {"city": "x" * 400, "days": 1})])
    parser = create_parser(name, TOOLS)
    events = [event for piece in text[: text.index("x" * 400) + 200] for event in parser.feed(piece)]
    assert isinstance(events[0], CallStart)
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert ("x" * 100 in arguments) == (name not in ("pythonic", "lfm2"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", " ", "\n hi \n", "a < b", 'He said: "[x]" {y}', "<", "[", "{", '{"a": 1}', "[1, 2]"])
def test_an_answer_without_calls_is_the_text(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(name, pieces)[0] == Parsed(text=text, calls=[])


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_that_was_not_offered_is_text(name: str) -> None:
    text = FORMATS[name]([("rm_rf", {"city": "/"})])
    parsed, _, _ = parse(name, list(text))
    assert parsed.calls == []
    assert "rm_rf" in parsed.text
    assert "/" in parsed.text
    assert parse(name, list(text), tools=None)[0].calls[0].name == "rm_rf"


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_keeps_what_came(name: str) -> None:
    text = FORMATS[name]([("get_weather", {"city": "Paris", "days": 2})])
    for end in range(len(text)):
        whole, _, _ = parse(name, [text[:end]])
        single, _, _ = parse(name, list(text[:end]))
        assert whole == single
        full = '{"city": "Paris", "days": 2}'
        for call in whole.calls:
            assert full.startswith(call.arguments.removesuffix("}")) or call.arguments == full


def test_blank_or_missing_arguments_are_an_empty_object() -> None:
    for inner in ('{"name": "now"}', '{"name": "now", "arguments": null}', '{"name": "now", "arguments": ""}'):
        assert parse("hermes", [f"<tool_call>{inner}</tool_call>"])[0].calls[0].arguments == "{}"


def test_arguments_may_come_first_or_as_a_string_or_wrapped() -> None:
    for inner in (
        '{"arguments": {"a": [1, "}"]}, "name": "now"}',
        '{"name": "now", "arguments": "{\\"a\\": [1, \\"}\\"]}"}',
        '{"type": "function", "function": {"name": "now", "arguments": {"a": [1, "}"]}}}',
        '{"id": 7, "x": {"name": "no"}, "name": "now", "arguments": {"a": [1, "}"]}, "y": [2]}',
    ):
        for pieces in ([inner], list(inner)):
            parsed, _, _ = parse("hermes", ["<tool_call>", *pieces, "</tool_call>after"])
            assert told(parsed) == [("now", {"a": [1, "}"]})], inner
            assert parsed.text == "after"


def test_newlines_inside_json_strings_are_escaped() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"code": "a\nb\tc"}}</tool_call>'
    assert told(parse("hermes", list(text))[0]) == [("now", {"code": "a\nb\tc"})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "12", 12),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "object"}, "{'a': 1}", {"a": 1}),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"enum": [1, 2]}, "2", 2),
        ({}, "12", "12"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
    ],
)
def test_values_without_quotes_are_typed_by_the_schema(schema: Any, text: str, value: Any) -> None:
    tools = {"f": {"properties": {"k": schema}}}
    source = f"<tool_call><function=f><parameter=k>\n{text}\n</parameter></function></tool_call>"
    assert told(parse("qwen3_coder", list(source), tools)[0]) == [("f", {"k": value})]


def test_glm_values_without_a_schema_are_json_where_they_can_be() -> None:
    text = "<tool_call>f\n" + "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in {"a": "12", "b": "x y", "c": "[1]"}.items()
    )
    assert told(parse("glm45", [text + "</tool_call>"], {"f": {}})[0]) == [("f", {"a": 12, "b": "x y", "c": [1]})]


def test_python_values_and_positions() -> None:
    text = """[get_weather("O'Hare, [x]", days=-2), now(a={'b': (1, None)}, c=true, d=some.name, e="q\\"")]"""
    assert told(parse("pythonic", list(text))[0]) == [
        ("get_weather", {"city": "O'Hare, [x]", "days": -2}),
        ("now", {"a": {"b": [1, None]}, "c": True, "d": "some.name", "e": 'q"'}),
    ]


def test_gemma_values() -> None:
    text = """<|tool_call>call:now{ "a" : "x\\n" , <|"|>b c<|"|>:[], d:{e:[-1.5,<|"|>,}<|"|>]},f:None,g:word } <tool_call|>"""
    wanted = {"a": "x\n", "b c": [], "d": {"e": [-1.5, ",}"]}, "f": None, "g": "word"}
    for pieces in ([text], list(text)):
        parsed, _, _ = parse("gemma4", [*pieces, "after"])
        assert (told(parsed), parsed.text) == ([("now", wanted)], "after")
    for cut_off in ("<|tool_call>call:now{a:[{b:1<tool_call|>x", "<|tool_call>call:now{a:[{b:1,nonsense<tool_call|>x"):
        parsed, _, _ = parse("gemma4", list(cut_off))
        assert (told(parsed), parsed.text) == ([("now", {"a": [{"b": 1}]})], "x")


def test_minimax3_elements_become_what_the_schema_says() -> None:
    mark = "]<]minimax[>["
    node = {"type": "object", "properties": {"item": {"type": "string"}, "next": {"$ref": "#/$defs/node"}}}
    properties = {
        "many": {"type": "array", "items": {"type": "string"}},
        "node": {"$ref": "#/$defs/node"},
        "none": {"type": "array"},
        "empty": {"type": "object"},
        "text": {"type": "string"},
    }
    tools = {"f": {"type": "object", "properties": properties, "$defs": {"node": node}}}
    inner = "<many>#<item>1#</item>\n#<item> 2 #</item>#</many>#<node>#<item>3#</item>#<next>#<item>4#</item>#</next>#</node>"
    inner += "#<none>#</none>#<empty>#</empty>#<text>#</text>#<free>#<item>5#</item>#<item>x y#</item>#</free>#<flag>true#</flag>"
    text = f'#<tool_call>#<invoke name="f">#{inner}#</invoke>#</tool_call>'.replace("#", mark)
    wanted = {
        "many": ["1", " 2 "],
        "node": {"item": "3", "next": {"item": "4"}},
        "none": [],
        "empty": {},
        "text": "",
        "free": [5, "x y"],
        "flag": True,
    }
    for pieces in ([text], list(text)):
        assert told(parse("minimax-m3", pieces, tools)[0]) == [("f", wanted)]


def test_kimi3_blocks_are_told_apart() -> None:
    text = "Hm.\n<|close|>think<|sep|><|open|>response<|sep|>Looking.<|close|>response<|sep|>" + kimi3(CALLS) + "<|end_of_msg|>"
    for pieces in ([text], list(text)):
        parser = KimiK3(TOOLS, inside=True)
        parsed = collected([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
        assert (parsed.reasoning, parsed.text, told(parsed)) == ("Hm.", "Looking.", CALLS)
        assert [call.call_id for call in parsed.calls] == ["get_weather:1", "now:2", "get_weather:3"]
    argument = '<|open|>argument key="a&quot;&amp;b" type="null"<|sep|>null<|close|>argument<|sep|>'
    text = f'<|open|>call tool="now" index="1"<|sep|>{argument}<|close|>call<|sep|>'
    assert told(parse("kimi_k3", [text])[0]) == [("now", {'a"&b': None})]


def test_harmony_tells_thinking_answer_and_calls_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        + "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        + "<|start|>assistant<|channel|>final<|message|>It is noon.<|return|>"
    )
    for pieces in ([text], list(text)):
        parsed, _, _ = parse("gpt-oss", pieces)
        assert (parsed.reasoning, parsed.text, told(parsed)) == ("Hm.", "Looking.\nIt is noon.", [("now", {})])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(BITS), max_size=30), st.integers(0, 1 << 30))
def test_any_chunking_of_anything_is_the_whole(name: str, bits: list[str], seed: int) -> None:
    text = "".join(bits)
    whole, _, _ = parse(name, [text])
    for pieces in (list(text), cut(text, seed)):
        assert parse(name, pieces)[0] == whole


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(BITS), max_size=60), st.integers(0, 1 << 30))
def test_any_chunking_of_much_more(name: str, bits: list[str], seed: int) -> None:
    text = "".join(bits)
    whole, _, _ = parse(name, [text])
    for pieces in (list(text), cut(text, seed)):
        assert parse(name, pieces)[0] == whole


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.tuples(st.text(max_size=8).filter(lambda text: text == text.strip()), st.integers(-9, 9)), min_size=1, max_size=3),
    st.integers(0, 1 << 30),
)
def test_any_call_survives(name: str, values: list[tuple[str, int]], seed: int) -> None:
    marks = ("</parameter>", "</arg_value>")
    calls = [("get_weather", {"city": text, "days": days}) for text, days in values if not any(mark in text for mark in marks)]
    if name == "pythonic":
        calls = [(tool, {"city": arguments["city"].replace("\\", ""), "days": arguments["days"]}) for tool, arguments in calls]
    assert told(parse(name, cut(FORMATS[name](calls), seed))[0]) == calls


HOSTILE = [
    "<tool_call>" * 9000,
    "<tool_call>\n<function=now><parameter=a>" + "<" * 100_000,
    '<tool_call>{"name": "now", "arguments": ' + "[" * 100_000,
    '<tool_call>{"arguments": {"a": "' + "\\" * 100_000,
    '{"name": "' + "n" * 100_000,
    '{"' + "k" * 100_000,
    "[" * 100_000,
    "[get_weather(" + "a," * 50_000,
    "[get_weather(city='" + "\\'" * 50_000,
    "[get_weather(days=" + "1" * 100_000 + ")]",
    "[now" * 25_000,
    " \n" * 50_000,
    "<" * 100_000,
    "<|channel|>" * 9000,
    "<|channel|>analysis<|message|><" * 4000,
    "[TOOL_CALLS]" * 9000,
    "[TOOL_CALLS]" + "a" * 100_000,
    "<｜tool▁call▁begin｜>" * 5000,
    "<tool_call>now\n" + "<arg_key>" * 10_000,
    "<tool_call>now\n<arg_key>a</arg_key>" + "<arg_value>" * 9000,
    "<|tool_call_begin|>" + "functions.now:0" * 7000,
    "[now(" + "((" * 50_000,
    "<|tool_call>call:now{a:" * 4000,
    "<|tool_call>call:now{a:" + "[" * 100_000,
    "<|tool_call>call:now{" + "a" * 100_000,
    '<|tool_call>call:now{a:<|"|>' + "<|" * 50_000,
    "<|tools_prefix|>[" * 6000,
    '<|tools_prefix|>[{"now": {}' + ', "now": {}' * 3000,
    ']<]minimax[>[<invoke name="now">' + "]<]minimax[>[<a>" * 6000,
    ']<]minimax[>[<invoke name="now">]<]minimax[>[<a>' + " \n" * 50_000,
    ']<]minimax[>[<invoke name="now">]<]minimax[>[<a>1' + "]<]" * 30_000,
    '<|open|>call tool="now"<|sep|>' + "<|open|>" * 10_000,
    '<|open|>call tool="now"<|sep|><|open|>argument key="a"<|sep|>' + "<|close|>" * 10_000,
    "<|open|>tools<|sep|>" * 5000,
]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"qwen25"}))
def test_hostile_text_costs_linear_work(name: str) -> None:
    for text in HOSTILE:
        _, _, whole = parse(name, [text])
        pieces = [text[start : start + 128] for start in range(0, len(text), 128)]
        _, _, cut_up = parse(name, pieces)
        assert whole.num_looked <= 5 * len(text), text[:40]
        assert cut_up.num_looked <= 20 * len(text), text[:40]


def test_text_events_are_never_empty() -> None:
    _, events, _ = parse("hermes", list("a <tool_call>{}</tool_call> b"))
    assert all(event.text for event in events if isinstance(event, Text | CallArguments))


CUT_IN_HALF = r'["\ud83d"]'  # half of a surrogate pair: no Unicode, so no reply could carry it


@pytest.mark.parametrize("text", [CUT_IN_HALF, r'{"\ud83d": 1}', "[1e999]", "[" * 500 + "]" * 500, "9" * 5000])
def test_a_value_that_no_reply_could_carry_is_a_string(text: str) -> None:
    parser = create_parser("glm45", None)
    events = parser.feed(f"<tool_call>f\n<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>") + parser.finish()
    (call,) = collected(events).calls
    assert json.loads(call.arguments) == {"a": text}
    call.arguments.encode()


def test_pythonic_values_that_no_reply_could_carry_are_strings() -> None:
    parser = create_parser("pythonic", None)
    (call,) = collected(parser.feed(r"[f(a=['\ud83d'], b=1e999)]") + parser.finish()).calls
    assert json.loads(call.arguments) == {"a": r"['\ud83d']", "b": "1e999"}


def test_a_name_that_is_no_unicode_names_no_tool() -> None:
    parser = create_parser("hermes", None)
    text = r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'
    found = collected(parser.feed(text) + parser.finish())
    assert (found.text, found.calls) == (text, [])


WRITTEN: dict[str, tuple[str, str, str]] = {  # before an argument k, behind it, behind the call
    "qwen3_coder": ("<tool_call><function=f><parameter=k>", "</parameter>", "</function></tool_call>"),
    "minimax-m2": (
        '<minimax:tool_call><invoke name="f"><parameter name="k">',
        "</parameter>",
        "</invoke></minimax:tool_call>",
    ),
    "glm45": ("<tool_call>f\n<arg_key>k</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
    "kimi_k3": (
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_end_mark_in_a_json_string_ends_nothing(name: str) -> None:
    before, behind, end = WRITTEN[name]
    tools = {"f": {"properties": {"k": {"type": ["object", "array"]}}}}
    for value in ({"a": [f'x\\"{behind}y', 1]}, [[f"{behind}{behind}"], {}], [1, behind], [], {"a": {}}):
        text = before + json.dumps(value) + behind + end
        for pieces in ([text], list(text), cut(text, 5)):
            parsed, _, _ = parse(name, [*pieces, "after"], tools)
            assert (told(parsed), parsed.text) == ([("f", {"k": value})], "after")
    for text, value in (("{'a': 'say \"'}", {"a": 'say "'}), ('[x] "', '[x] "'), ('[1] "', '[1] "'), ('"', '"')):
        assert told(parse(name, list(before + text + behind + end), tools)[0]) == [("f", {"k": value})]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " a ", " a "),
        ({"enum": ["C", " F"]}, "  C ", "C"),
        ({"enum": ["C", " F"]}, " F", " F"),
        ({"enum": ["C", " F"]}, " x ", " x "),
        ({"const": "C"}, " C", "C"),
        ({"anyOf": [{"enum": ["C"]}, {"type": "null"}]}, " C ", "C"),
        ({"type": "string", "format": "date"}, " 2024-01-01 ", "2024-01-01"),
        ({"type": "string", "pattern": "^a+$"}, "aa ", "aa"),
        ({"type": "string", "maxLength": 3}, " ab", " ab"),
        ({"type": "string", "maxLength": 2}, " ab", "ab"),
        ({"$ref": "#/$defs/unit"}, " C", "C"),
        ({"$ref": "#/$defs/loop"}, " C", " C"),
    ],
)
def test_blanks_that_a_schema_has_no_place_for_go(name: str, schema: Any, text: str, value: str) -> None:
    before, behind, end = WRITTEN[name]
    definitions = {"unit": {"enum": ["C", "F"]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}}
    tools = {"f": {"properties": {"k": schema}, "$defs": definitions}}
    source = before + text + behind + end
    for pieces in ([source], list(source)):
        assert told(parse(name, pieces, tools)[0]) == [("f", {"k": value})]
