"""Grammars that make a model call tools: a JSON array of calls, or a format's own marks with a schema inside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..tool_parsers.events import Tools

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

# parser -> (what begins a call, what ends it, which text triggers it, how its arguments are written); {name} is the tool's. Whether
# the marks are control tokens of a tokenizer, which no text can make, is for the caller to know.
TAGS: dict[str, tuple[str, str, str, str]] = {
    "hermes": ('<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>", "<tool_call>", "json"),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "json",
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "json",
    ),
    "deepseekv32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n',
        "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "<｜DSML｜function_calls>",
        "deepseek_xml",
    ),
    "deepseekv4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n',
        "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "<｜DSML｜tool_calls>",
        "deepseek_xml",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function={name}>\n",
        "\n</function>\n</tool_call>",
        "<tool_call>",
        "qwen_xml",
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="{name}">\n',
        "\n</invoke>\n</minimax:tool_call>",
        "<minimax:tool_call>",
        "minimax_xml",
    ),
    "minimax-m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{name}">',
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "]<]minimax[>[<tool_call>",
        "minimax_m3_xml",
    ),
    "gemma4": ("<|tool_call>call:{name}", "<tool_call|>", "<|tool_call>", "gemma"),
    "apertus2509": ('<|tools_prefix|>[{{"{name}": ', "}]<|tools_suffix|>", "<|tools_prefix|>", "json"),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>',
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        "<|open|>tools<|sep|>",
        "kimi_k3_xml",
    ),
    "glm45": ("<tool_call>{name}\n", "\n</tool_call>", "<tool_call>", "glm_xml"),
    "hunyuan": (
        "<tool_calls><tool_call>{name}<tool_sep>",
        "</tool_call></tool_calls>",
        "<tool_calls>",
        "glm_xml",
    ),
    "llama3": ('<|python_tag|>{{"name": "{name}", "parameters": ', "}", "<|python_tag|>", "json"),
    "mistral": ('[TOOL_CALLS] [{{"name": "{name}", "arguments": ', "}]", "[TOOL_CALLS]", "json"),
    "interns1": (
        '<|action_start|> <|plugin|>\n{{"name": "{name}", "parameters": ',
        "}<|action_end|>",
        "<|action_start|> <|plugin|>",
        "json",
    ),
    "cohere_command4": (
        '<|START_ACTION|>[{{"tool_name": "{name}", "parameters": ',
        "}]<|END_ACTION|>",
        "<|START_ACTION|>",
        "json",
    ),
    "gpt-oss": (
        "<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>",
        "<|call|>",
        "<|channel|>commentary to=",
        "json",
    ),
}
for _like, _names in {
    "hermes": ("qwen", "qwen25", "trinity"),
    "qwen3_coder": ("mimo", "step3p5"),
    "glm45": ("glm", "glm47"),
}.items():
    TAGS |= dict.fromkeys(_names, TAGS[_like])


def calls_schema(tools: Tools, *, at_most_one: bool) -> dict[str, Any]:
    """JSON schema of an array of at least one call, {"name", "parameters"}, of these tools."""
    definitions: dict[str, Any] = {}
    calls = []
    for index, (name, schema) in enumerate(tools.items()):
        place = f"tool{index}"
        definitions[place] = _moved(schema or NO_ARGUMENTS, f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    if at_most_one:
        array["maxItems"] = 1
    return {**array, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """The schema with references that are right when it stands at ``place`` of another."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def _style(style: str) -> dict[str, str]:
    return {} if style == "json" else {"style": style}


def strict_tag(parser: str, tools: Tools) -> dict[str, Any] | None:
    """A structural tag with which free text may hold calls of these tools only, with arguments by schema.

    None: calls of this format cannot be written as text.
    """
    if parser not in TAGS:
        return None
    begin, end, trigger, style = TAGS[parser]
    tags = [
        {
            "type": "tag",
            "begin": begin.format(name=json.dumps(name, ensure_ascii=False)[1:-1]),
            "content": {"type": "json_schema", "json_schema": schema or NO_ARGUMENTS, **_style(style)},
            "end": end,
        }
        for name, schema in tools.items()
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags}}
