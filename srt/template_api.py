"""The route that shows a conversation as the model's chat template writes it."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from ..managers.chat_template import RESERVED_KWARGS
from ..managers.errors import RequestError
from ..managers.prompt_text import prompt_text
from .http_io import JSONReply, parse_body
from .openai.protocol import ChatBody
from .server_state import state_of

FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")

router = APIRouter()


def install(app: FastAPI) -> None:
    """Add the route."""
    app.include_router(router)


def _parse(values: dict[str, Any]) -> ChatBody:
    return ChatBody.parse({name: values[name] for name in FIELDS if values.get(name) is not None})


_BODY = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "add_generation_prompt": {"type": "boolean", "default": True},
        "continue_final_message": {"type": "boolean", "default": False},
        "chat_template_kwargs": {"type": "object"},
    },
}


@router.post(
    "/apply-template", openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}}
)
async def apply_template(request: Request) -> Response:
    """{"prompt": text}: what /generate takes as ``text`` to continue this conversation. BOS is left out where /generate adds it."""
    state = state_of(request)
    tm = state.engine()
    body = await parse_body(request, _parse)
    template = state.chat_template
    if template is None:
        raise RequestError("The model has no chat template; give one with --chat-template.", param="messages")
    for name in RESERVED_KWARGS & body.chat_template_kwargs.keys():
        raise RequestError(f"chat_template_kwargs: `{name}` is reserved.", param="chat_template_kwargs")
    messages = [{**each.model_dump(exclude_none=True), "role": each.role.lower()} for each in body.messages]
    text = await asyncio.to_thread(
        prompt_text,
        template,
        tm.tokenizer,
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **body.chat_template_kwargs,
    )
    return JSONReply({"prompt": text})
