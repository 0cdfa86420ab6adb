"""The parsers of calls and thinking as routes, for text that a client generated natively."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from ..managers.errors import RequestError
from ..managers.reasoning.parser import output_parser, reasoning_names, split_reasoning
from ..managers.tool_parsers.events import Parsed, collected
from ..managers.tool_parsers.registry import TOOL_PARSERS
from .http_io import JSONReply, parse_body
from .openai.chat_tools import offered_of
from .server_state import state_of
from .struct_body import body_of, struct_parser

router = APIRouter()


class ParseCallInput(msgspec.Struct, kw_only=True):
    """Body of /parse_function_call. tool_call_parser: null means the server's. tools: those that may be called, none for any."""

    text: str
    tools: list[dict[str, Any]] = []
    tool_call_parser: str | None = None


class SeparateReasoningInput(msgspec.Struct, kw_only=True):
    """Body of /separate_reasoning. reasoning_parser: null means the server's."""

    text: str
    reasoning_parser: str | None = None


def install(app: FastAPI) -> None:
    """Add the routes."""
    app.include_router(router)


@router.post("/parse_function_call", openapi_extra=body_of(ParseCallInput))
async def parse_function_call(request: Request) -> Response:
    """{"normal_text", "calls": [{"tool_index", "name", "parameters"}]}; parameters is JSON text."""
    state = state_of(request)
    query = await parse_body(request, struct_parser(ParseCallInput))
    name = query.tool_call_parser or state.engine().config.tool_call_parser
    if name not in TOOL_PARSERS:
        raise RequestError(
            f"tool_call_parser {name!r} is not known; known are {', '.join(TOOL_PARSERS)}.", param="tool_call_parser"
        )
    parsed = await asyncio.to_thread(_parsed, query, name)
    calls = [{"tool_index": call.index, "name": call.name, "parameters": call.arguments} for call in parsed.calls]
    return JSONReply({"normal_text": parsed.text, "calls": calls})


def _parsed(query: ParseCallInput, name: str) -> Parsed:
    tools = offered_of(query.tools) if query.tools else None
    parser = output_parser(calls=name, tools=tools)
    return collected([*parser.feed(query.text), *parser.finish()])


@router.post("/separate_reasoning", openapi_extra=body_of(SeparateReasoningInput))
async def separate_reasoning(request: Request) -> Response:
    """{"reasoning_text", "text"}"""
    state = state_of(request)
    query = await parse_body(request, struct_parser(SeparateReasoningInput))
    name = query.reasoning_parser or state.engine().config.reasoning_parser
    if name is None or name not in reasoning_names():
        raise RequestError(
            f"reasoning_parser {name!r} is not known; known are {', '.join(reasoning_names())}.", param="reasoning_parser"
        )
    thinking, answer = await asyncio.to_thread(split_reasoning, query.text, name)
    return JSONReply({"reasoning_text": thinking, "text": answer})
