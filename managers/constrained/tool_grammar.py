"""Grammars that make a model call tools: a JSON array of calls, or a format's own marks with a schema inside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..tool_parsers.events import Tools

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

# parser -> (what begins a call, what ends it, which text triggers it); {name} is the tool's. Formats whose marks are control tokens
# are not here: a grammar is over text.
_TAGS: dict[str, tuple[str, str, str]] = {
    "hermes": ('<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>", "<tool_call>"),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
}
for _name in ("qwen", "qwen25", "trinity"):
    _TAGS[_name] = _TAGS["hermes"]


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


def strict_tag(parser: str, tools: Tools) -> dict[str, Any] | None:
    """A structural tag with which free text may hold calls of these tools only, with arguments by schema.

    None: calls of this format cannot be written as text.
    """
    if parser not in _TAGS:
        return None
    begin, end, trigger = _TAGS[parser]
    tags = [
        {
            "type": "tag",
            "begin": begin.format(name=json.dumps(name, ensure_ascii=False)[1:-1]),
            "content": {"type": "json_schema", "json_schema": schema or NO_ARGUMENTS},
            "end": end,
        }
        for name, schema in tools.items()
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags}}
