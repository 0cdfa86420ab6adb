"""Grammars of calls: what their schemas allow, and that the backends compile them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from banyan.managers.constrained.grammar import Vocabulary, create_backend
from banyan.managers.constrained.schema_check import candidates
from banyan.managers.constrained.tool_grammar import TAGS, calls_schema, strict_tag
from banyan.managers.tool_parsers.events import collected
from banyan.managers.tool_parsers.registry import TOOL_PARSERS, create_parser, parser_for

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "again": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["next"],
        }
    },
}
OTHER: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/node"}},
    "required": ["n"],
    "$defs": {"node": {"type": "integer"}},
}
TOOLS: dict[str, Any] = {"tree": TREE, "other": OTHER, "now": {}}


def is_valid(value: Any, **options: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(calls_schema(TOOLS, **options)).is_valid(value))


def call(name: str, parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


def test_references_stay_within_their_tool() -> None:
    tree = call("tree", {"root": {"next": {"next": None}}, "again": {"root": {"next": None}}})
    assert is_valid([tree, call("other", {"n": 3}), call("now", {})], at_most_one=False)
    assert not is_valid([call("other", {"n": {"next": None}})], at_most_one=False)
    assert not is_valid([call("tree", {"root": 3})], at_most_one=False)
    assert not is_valid([call("now", {"a": 1})], at_most_one=False)
    assert not is_valid([call("unknown", {})], at_most_one=False)
    assert not is_valid([], at_most_one=False)
    assert is_valid([call("now", {})], at_most_one=True)
    assert not is_valid([call("now", {})] * 2, at_most_one=True)


def test_the_schema_is_one_that_backends_enforce() -> None:
    text = json.dumps(calls_schema(TOOLS, at_most_one=False))
    found = candidates("json_schema", text, preferred="xgrammar", installed=["xgrammar", "llguidance"])
    assert [each.backend for each in found] == ["xgrammar", "llguidance"]


XML = {
    "qwen_xml": '<parameter=root>\n{"next": null}\n</parameter>',
    "minimax_xml": '<parameter name="root">{"next": null}</parameter>',
    "glm_xml": '<arg_key>root</arg_key>\n<arg_value>{"next": null}</arg_value>',
    "minimax_m3_xml": "]<]minimax[>[<root>]<]minimax[>[<next>null]<]minimax[>[</next>]<]minimax[>[</root>",
    "kimi_k3_xml": '<|open|>argument key="root" type="object"<|sep|>{"next": null}<|close|>argument<|sep|>',
    "gemma": "{root:{next:null}}",
    "deepseek_xml": '<｜DSML｜parameter name="root" string="false">{"next": null}</｜DSML｜parameter>',
}


EMPTY = {"gemma": "{}"}


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if strict_tag(name, TOOLS)])
def test_strict_tags_are_what_the_parser_reads(name: str) -> None:
    tag = strict_tag(name, TOOLS)
    assert tag is not None
    assert candidates("structural_tag", json.dumps(tag), preferred="xgrammar", installed=["xgrammar"])
    for each, (tool, arguments) in zip(
        tag["format"]["tags"], (("tree", '{"root": {"next": null}}'), ("other", "{}"), ("now", "{}")), strict=True
    ):
        assert each["begin"].startswith(tag["format"]["triggers"][0])
        parser = create_parser(name, TOOLS)
        written = (
            arguments
            if "style" not in each["content"]
            else XML[each["content"]["style"]]
            if "root" in arguments
            else EMPTY.get(each["content"]["style"], "")
        )
        events = parser.feed(each["begin"] + written + each["end"]) + parser.finish()
        assert [event.name for event in events if hasattr(event, "name")] == [tool]
        assert "".join(event.text for event in events if hasattr(event, "text")) == arguments


ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {
            "type": "object",
            "properties": {"tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3}, "x": {"type": "integer"}},
            "required": ["tags", "x"],
            "additionalProperties": False,
        },
        "flag": {"type": "boolean"},
        "units": {"enum": ["C", "F"]},
        "more": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    },
    "required": ["city", "days", "deep", "flag", "units"],
    "additionalProperties": False,
}
SHORT = {"code": {"type": "string", "pattern": "^[a-c]{2}$"}, "name": {"type": "string", "maxLength": 4}}
ENDS = ("</parameter>", "</arg_value>", "]<]minimax[>[</", '<|"|>', "<|close|>argument<|sep|>", "</｜DSML｜parameter>")
EVERY = Vocabulary(tokens=[bytes([byte]) for byte in range(256)] + [b""], stop_ids=(256,))


def allowed_by(matcher: Any) -> list[int]:
    row = np.zeros(9, np.int32)
    matcher.fill_mask(row)
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little", count=257)).tolist()
    return found


def walk(compiled: Any, begin: str, end: str, rng: random.Random) -> str | None:
    """A call that the grammar allows, drawn byte by byte; None if it became too long."""
    text, matcher, ends = bytearray(begin.encode()), compiled.matcher(), [each.encode() for each in ENDS]
    assert all(map(matcher.accept, text))
    while len(text) < 1200:
        allowed = allowed_by(matcher)
        if 256 in allowed and text.endswith(end.encode()):
            return text.decode()
        plain = [byte for byte in allowed if byte == 10 or 32 <= byte < 127]
        closing = [byte for byte in plain if chr(byte) in "<}]|>,{"]
        piece = bytes([rng.choice(closing if closing and rng.random() < 0.4 else plain or [x for x in allowed if x < 256])])
        if rng.random() < 0.3 and ord('"') in plain:
            piece = b'"'
        elif rng.random() < 0.3:  # a value's end, also amid a string
            likely = [each for each in ends if each[0] in plain and fits(compiled, text + each)]
            piece = rng.choice(likely) if likely else piece
        assert all(map(matcher.accept, piece))
        text += piece
    return None


def fits(compiled: Any, text: bytes) -> bool:
    matcher = compiled.matcher()
    return all(map(matcher.accept, text))


@pytest.mark.parametrize("number", [2, pytest.param(25, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", sorted({tuple(tag): name for name in TOOL_PARSERS if (tag := TAGS.get(name))}.values()))
def test_whatever_a_strict_grammar_can_finish_is_read_as_arguments_that_validate(name: str, number: int) -> None:
    schema = ARGUMENTS
    if name != "minimax-m3":  # has no grammar for more of a string
        schema = {**ARGUMENTS, "properties": {**ARGUMENTS["properties"], **SHORT}, "required": [*ARGUMENTS["required"], *SHORT]}
    library, rng, finished = create_backend("xgrammar", EVERY), random.Random(name), 0
    tag = strict_tag(name, {"f": schema})
    assert tag is not None
    (found,) = candidates("structural_tag", json.dumps(tag), preferred="xgrammar", installed=["xgrammar"])
    compiled = library.load(library.compile("structural_tag", found.text))
    (each,) = tag["format"]["tags"]
    for _ in range(10 * number):
        text = walk(compiled, each["begin"], each["end"], rng)
        if text is not None:
            parser = create_parser(name, {"f": schema})
            (call,) = collected(parser.feed(text) + parser.finish()).calls
            jsonschema.Draft202012Validator(schema).validate(json.loads(call.arguments))
            finished += 1
        if finished == number:
            return
    pytest.fail("no call was finished")


def test_other_formats_have_no_tag() -> None:
    assert strict_tag("kimi_k2", TOOLS) is None
    assert strict_tag("pythonic", TOOLS) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n{{ call }}", "hermes"),
        ("<tool_call><function=x>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|channel|>x<|message|>", "gpt-oss"),
        ("<｜tool▁call▁begin｜>function\n```json", "deepseekv3"),
        ("<｜tool▁call▁begin｜>", "deepseekv31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|start_header_id|> parameters", "llama3"),
        ("<｜DSML｜function_calls>", "deepseekv32"),
        ("<｜DSML｜tool_calls>", "deepseekv4"),
        ("<｜tool_calls_begin｜> steptml:invoke", "step3"),
        ("<|tool_call_start|>[", "lfm2"),
        ("<|action_start|> <|plugin|>", "interns1"),
        ("<|START_ACTION|>", "cohere_command4"),
        ("<tool_calls><tool_call>x<tool_sep>", "hunyuan"),
        ("<function name=x><param name=y>", "minicpm5"),
        ("<|open|>message<|sep|><|close|>", "kimi_k3"),
        ("]<]minimax[>[<tool_call>", "minimax-m3"),
        ("<|tool_call>call:x", "gemma4"),
        ("<|tools_prefix|>[", "apertus2509"),
        ("plain", None),
        ("", None),
    ],
)
def test_the_format_is_read_off_the_template(template: str, name: str | None) -> None:
    assert parser_for(template) == name
    assert name is None or name in TOOL_PARSERS
