"""Counts HTTP requests and responses by route, and gives each request an id, which it tells in a header."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..managers.request_context import RequestContext, set_context
from ..managers.tally import Clamped, Counter

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = re.compile(rb"[!-~]{1,128}")
OTHER = "other"  # the endpoint of a path that is no route: paths that clients make up must not become labels
METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
MUTE = frozenset({"/health", "/health_generate", "/livez", "/readyz", "/startupz", "/metrics"})  # probes are not counted


@dataclass(slots=True)
class HttpCounts:
    """By (endpoint, method); responses by (endpoint, status, method)."""

    clamped: Clamped = field(default_factory=Clamped)
    requests: Counter = field(init=False)
    responses: Counter = field(init=False)
    active: dict[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests, self.responses = Counter(self.clamped), Counter(self.clamped)


class HttpMetrics:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, counts: HttpCounts, routes: frozenset[str]) -> None:
        """routes: paths that may become labels as they are."""
        self._app = app
        self._counts = counts
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        known = REQUEST_ID.fullmatch(given) is not None
        request_id = given if known else uuid.uuid4().hex.encode()
        set_context(
            RequestContext(
                id=request_id.decode(),
                given=known,
                traceparent=headers.get(b"traceparent", b"").decode("latin-1"),
                routing_key=headers.get(b"x-smg-routing-key", b"").decode("latin-1"),
            )
        )
        path, method = scope["path"], scope["method"] if scope["method"] in METHODS else OTHER
        endpoint = path if path in self._routes else OTHER
        await self._counted(scope, receive, send, (endpoint, method), request_id)

    async def _counted(self, scope: Scope, receive: Receive, send: Send, key: tuple[str, str], request_id: bytes) -> None:
        counts, mute = self._counts, key[0] in MUTE

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                raw: list[Any] = message.setdefault("headers", [])
                message["headers"] = [*raw, (b"x-request-id", request_id)]
                if not mute:
                    counts.responses.add(1, key[0], str(message["status"]), key[1])
            await send(message)

        if mute:
            await self._app(scope, receive, watched)
            return
        counts.requests.add(1, *key)
        counts.active[key] = counts.active.get(key, 0) + 1
        try:
            await self._app(scope, receive, watched)
        finally:
            counts.active[key] -= 1
