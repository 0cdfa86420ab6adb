"""Overload is answered before a request costs anything: no routing, no body, no validation."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ..managers.errors import RequestError
from ..managers.request_gate import QUEUE_FULL_MESSAGE
from .http_errors import error_response
from .server_state import ServerState

GENERATING = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})


class OverloadGate:
    """ASGI middleware: 503 while as many requests are alive as may run and wait.

    Not with priority scheduling: then a request may displace one that waits, and its body must be read to know.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in GENERATING and self._is_full():
            if self._state.tm is not None:
                self._state.tm.stats.counters["admission_rejections"].add(1)
            error = RequestError(QUEUE_FULL_MESSAGE, status_code=503, err_type="ServiceUnavailableError")
            await error_response(scope["path"], error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_full(self) -> bool:
        tm = self._state.tm
        return tm is not None and not tm.info.priority_scheduling and tm.is_full
