"""The /v1 routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from ..http_io import JSONReply
from ..server_state import ServerState, state_of
from .chat import chat_completions
from .completions import completions
from .protocol import ChatBody, CompletionBody
from .replies import model_not_found, served_names

OWNED_BY = "sglang"  # the value by which gateways recognise the wire format

router = APIRouter(prefix="/v1")


def _body(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


router.add_api_route("/completions", completions, methods=["POST"], openapi_extra=_body(CompletionBody))
router.add_api_route("/chat/completions", chat_completions, methods=["POST"], openapi_extra=_body(ChatBody))


@router.get("/models")
async def models(request: Request) -> Response:
    """The one model that is served, a card for each of its names."""
    state = state_of(request)
    return JSONReply({"object": "list", "data": [_card(state, name) for name in served_names(state.engine())]})


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The card of a model, or 404."""
    state = state_of(request)
    if name not in served_names(state.engine()):
        raise model_not_found(name)
    return JSONReply(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    tm = state.engine()
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": OWNED_BY,
        "root": tm.config.model_path,
        "parent": None,
        "max_model_len": tm.info.model.context_len,
    }


def install(app: FastAPI) -> None:
    """Add the /v1 routes."""
    app.include_router(router)
