"""Routes that open and close sessions. Turns are ordinary requests with ``session_params``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from ..managers.errors import RequestError
from ..managers.sessions.sessions import OpenSession
from .http_io import JSONReply, parse_body
from .server_state import state_of

router = APIRouter()

_OPEN = {
    "type": "object",
    "required": ["capacity_of_str_len"],
    "properties": {
        "capacity_of_str_len": {"type": "integer", "minimum": 1},
        "session_id": {"type": "string"},
        "streaming": {"type": "boolean", "default": False},
        "timeout": {"type": "number", "exclusiveMinimum": 0},
    },
}
_CLOSE = {"type": "object", "required": ["session_id"], "properties": {"session_id": {"type": "string"}}}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.get("/open_session", include_in_schema=False)
@router.post("/open_session", openapi_extra=_body(_OPEN))
async def open_session(request: Request) -> Response:
    """Open a session; the answer is its id."""
    tm = state_of(request).serving()
    return JSONReply(await tm.open_session(await parse_body(request, OpenSession.parse)))


@router.get("/close_session", include_in_schema=False)
@router.post("/close_session", openapi_extra=_body(_CLOSE))
async def close_session(request: Request) -> Response:
    """Close a session; a turn under way may end first."""
    tm = state_of(request).engine()
    await tm.close_session(await parse_body(request, _session_id))
    return Response(status_code=200)


def _session_id(values: dict[str, Any]) -> str:
    session_id = values.get("session_id")
    if not isinstance(session_id, str):
        raise RequestError("session_id must be a string.", param="session_id")
    return session_id


def install(app: FastAPI) -> None:
    """Add the session routes."""
    app.include_router(router)
