"""The body of /generate as the OpenAPI document tells it: every field that is read, with its default where that is no null."""

from __future__ import annotations

from typing import Any

import msgspec

from ..managers.sampling_params import SamplingParams


def _sampling() -> dict[str, Any]:
    """Every sampling parameter. A list of texts or ids may be one text or id, and a schema may be JSON itself."""
    (_,), components = msgspec.json.schema_components([SamplingParams], ref_template="#/{name}")
    schema: dict[str, Any] = components["SamplingParams"]
    fields = schema["properties"]
    for name in ("stop", "stop_regex", "bad_words", "stop_token_ids"):
        one = fields[name].pop("items")
        fields[name] = {"anyOf": [one, {"type": "array", "items": one}], "default": fields[name]["default"]}
    for name in ("json_schema", "structural_tag"):
        fields[name] = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}], "default": None}
    return {"type": "object", "properties": fields, "additionalProperties": False}


SAMPLING = _sampling()
HIDDEN = [{"type": "boolean"}, {"const": "last"}]
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
ROOM = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
GENERATE_BODY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "input_ids": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}},
        "input_embeds": {
            "type": "array",
            "items": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}},
        },
        "sampling_params": {"anyOf": [SAMPLING, {"type": "array", "items": SAMPLING}], "default": {}},
        "rid": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "stream": {"type": "boolean", "default": False},
        "incremental": {"type": "boolean"},
        "extra_key": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "cache_salt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "priority": {"type": "integer"},
        "cache_hint": {
            "type": "object",
            "properties": {
                "pin_seconds": {"type": "number", "minimum": 0, "maximum": 86400},
                "priority": {"type": "integer", "minimum": 0, "maximum": 1000},
            },
            "additionalProperties": False,
        },
        "routing_key": {"type": "string"},
        "data_parallel_rank": {"type": "integer", "minimum": 0},
        "routed_dp_rank": {"type": "integer", "minimum": 0},
        "bootstrap_host": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "bootstrap_port": {"anyOf": [PORT, {"type": "array", "items": {"anyOf": [PORT, {"type": "null"}]}}]},
        "bootstrap_room": {"anyOf": [ROOM, {"type": "array", "items": ROOM}]},
        "continuations": {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        },
        "require_reasoning": {"type": "boolean", "default": False},
        "max_thinking_tokens": {"type": "integer", "minimum": 0},
        "timeout": {"type": "number", "exclusiveMinimum": 0},
        "return_logprob": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}}], "default": False},
        "logprob_start_len": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}], "default": -1},
        "top_logprobs_num": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}], "default": 0},
        "token_ids_logprob": {
            "type": "array",
            "items": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
        },
        "return_text_in_logprobs": {"type": "boolean", "default": False},
        "custom_logit_processor": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "return_prompt_token_ids": {"type": "boolean", "default": False},
        "return_hidden_states": {"anyOf": [*HIDDEN, {"type": "array", "items": {"anyOf": HIDDEN}}], "default": False},
        "session_id": {"type": "string"},
        "session_params": {
            "type": "object",
            "required": ["id"],
            "properties": {
                "id": {"type": "string"},
                "rid": {"type": "string"},
                "offset": {"type": "integer"},
                "replace": {"type": "boolean", "default": False},
                "drop_previous_output": {"type": "boolean", "default": False},
            },
        },
    },
}
