"""Grammars of calls: what their schemas allow, and that the backends compile them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from banyan.managers.constrained.schema_check import candidates
from banyan.managers.constrained.tool_grammar import calls_schema, strict_tag
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
