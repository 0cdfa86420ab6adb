"""What a parser finds in a model's text, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Text(msgspec.Struct, frozen=True):
    """Part of the visible answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Part of the model's thinking."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call begins. index counts the calls of one answer from 0; call_id: where the format names one."""

    index: int
    name: str
    call_id: str | None = None


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of the JSON text of a call's arguments. The pieces of a call that the model finished join to a JSON object."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | CallArguments
Tools = Mapping[str, Mapping[str, Any]]  # name of a tool -> JSON schema of its parameters


class ParsedCall(msgspec.Struct):
    """A whole call; arguments is JSON text."""

    index: int
    name: str
    arguments: str = ""
    call_id: str | None = None


class Parsed(msgspec.Struct):
    """A whole answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = []


def collected(events: list[Event]) -> Parsed:
    """The answer that the events of one parser make up."""
    parsed = Parsed(calls=[])
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, CallStart):
            parsed.calls.append(ParsedCall(event.index, event.name, "", event.call_id))
        elif isinstance(event, CallArguments):
            arguments.setdefault(event.index, []).append(event.text)
    parsed.text = "".join(event.text for event in events if isinstance(event, Text))
    parsed.reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    for call in parsed.calls:
        call.arguments = "".join(arguments.get(call.index, []))
    return parsed
