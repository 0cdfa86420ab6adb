"""Error replies: one set of fields for every route, and the last net that turns an unforeseen exception into a 500.

OpenAI routes (/v1/...) answer nested and flat in one body, since clients read either; all others answer nested.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ..managers.errors import EngineDeadError, EngineRestartError, RequestError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

INTERNAL_MESSAGE = "Internal server error."
RETRY_AFTER_SECONDS = "1"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_BUSY = (429, 503)  # worth another try a little later
_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError", 413: "RequestTooLargeError", 503: "ServiceUnavailableError"}


def as_request_error(error: Exception) -> RequestError:
    """What a client may know of an exception. Anything unforeseen becomes a bare 500; the caller logs it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineRestartError):
        return RequestError(str(error), status_code=503, err_type="EngineRestartError")
    if isinstance(error, EngineDeadError):
        return RequestError("The engine has died.", status_code=503, err_type="EngineDeadError")
    if isinstance(error, HTTPException):
        err_type = _TYPES.get(error.status_code, "HTTPError")
        return RequestError(str(error.detail), status_code=error.status_code, err_type=err_type)
    return RequestError(INTERNAL_MESSAGE, status_code=500, err_type="InternalServerError")


def blotted(text: str) -> str:
    """The text without addresses of objects, which never leave the process."""
    return _ADDRESS.sub("0x...", text)


def error_body(error: RequestError, *, openai: bool) -> dict[str, Any]:
    """The reply's JSON."""
    fields = {
        "message": blotted(error.message),
        "type": error.err_type,
        "param": error.param,
        "code": error.status_code,
    }
    return {"error": fields, "object": "error", **fields} if openai else {"error": fields}


def error_response(path: str, error: Exception) -> Response:
    """The reply to a request at ``path`` that failed with ``error``."""
    known = as_request_error(error)
    headers = dict(getattr(error, "headers", None) or {})
    if known.status_code in _BUSY:
        headers["Retry-After"] = RETRY_AFTER_SECONDS
    if known.status_code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = msgspec.json.encode(error_body(known, openai=path.startswith("/v1/")))
    return Response(body, status_code=known.status_code, media_type="application/json", headers=headers)


async def _handle_validation(request: Request, error: Exception) -> Response:
    """A query parameter that FastAPI refused."""
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    name = str(first["loc"][-1]) if first.get("loc") else None
    return error_response(request.url.path, RequestError(f"{name}: {first.get('msg', 'invalid')}", param=name))


async def _handle(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, error)


def install(app: FastAPI) -> None:
    """Route every exception of the app's handlers through this module."""
    for kind in (RequestError, EngineDeadError, HTTPException):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(RequestValidationError, _handle_validation)
    app.add_middleware(LastNet)


class LastNet:
    """ASGI middleware: logs an unforeseen exception once, answers 500 if nothing was sent yet."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:  # in the middle of its own body
            return
        except Exception as error:  # the top of a request: nothing above may see it
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await error_response(scope["path"], error)(scope, receive, send)
