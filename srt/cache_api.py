"""The routes that show what the prefix cache holds and why a prompt hits or misses it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from ..managers.errors import RequestError
from ..managers.generation import GenerateInput
from .http_io import JSONReply, gone, parse_body, unless_disconnected
from .openai.chat_prompt import prompt_ids
from .openai.protocol import ChatBody
from .server_state import state_of

MAX_K = 100
PROMPT_FIELDS = ("text", "input_ids", "messages")

router = APIRouter()


def install(app: FastAPI) -> None:
    """Add the routes of the cache."""
    app.include_router(router)


@router.get("/radix_cache")
async def radix_cache(request: Request, k: int = 10) -> Response:
    """Size, counters and the k hottest prefixes. The text of prefixes with an extra_key or a cache_salt is not shown."""
    if not 0 <= k <= MAX_K:
        raise RequestError(f"k must be in [0, {MAX_K}], got {k}.", param="k")
    report = await unless_disconnected(request, state_of(request).engine().radix_cache(k))
    return gone() if report is None else JSONReply(report)


class ExplainInput(msgspec.Struct, kw_only=True):
    """Body of /radix_cache/explain: a prompt in one of three forms, and its namespace. ``chat`` is made of messages."""

    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    extra_key: str | None = None
    cache_salt: str | None = None
    chat: Any = None

    @classmethod
    def parse(cls, values: dict[str, Any]) -> ExplainInput:
        """Check the types. Raises RequestError that names the field."""
        given = {name: value for name, value in values.items() if value is not None and name != "chat"}
        try:
            query = msgspec.convert(given, cls, strict=True)
        except msgspec.ValidationError as error:
            path = str(error).partition("`$.")[2]
            raise RequestError(str(error), param=path.split("`")[0].split("[")[0] or None) from None
        if sum(getattr(query, name) is not None for name in PROMPT_FIELDS) != 1:
            raise RequestError("Exactly one of text, input_ids and messages must be given.", param="text")
        if query.messages is not None:
            names = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
            query.chat = ChatBody.parse({name: getattr(query, name) for name in names})
        return query


_EXPLAIN_BODY = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "input_ids": {"type": "array", "items": {"type": "integer"}},
        "messages": {"type": "array", "items": {"type": "object"}},
        "add_generation_prompt": {"type": "boolean", "default": True},
        "continue_final_message": {"type": "boolean", "default": False},
        "chat_template_kwargs": {"type": "object"},
        "extra_key": {"type": "string"},
        "cache_salt": {"type": "string"},
    },
}


@router.post(
    "/radix_cache/explain",
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _EXPLAIN_BODY}}}},
)
async def explain(request: Request) -> Response:
    """How much of a prompt would hit the prefix cache, and where and how it departs from the nearest cached prefix."""
    state = state_of(request)
    tm = state.engine()
    query = await parse_body(request, ExplainInput.parse)
    ids = query.input_ids
    if query.chat is not None:
        ids = await asyncio.to_thread(prompt_ids, state.chat_template, tm.tokenizer, query.chat)
    prompt = GenerateInput(text=query.text, input_ids=ids, extra_key=query.extra_key, cache_salt=query.cache_salt)
    answer = await unless_disconnected(request, tm.explain_cache(prompt))
    return gone() if answer is None else JSONReply(answer)
