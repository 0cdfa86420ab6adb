"""The door: keys, and how long the head of a request may be.

A request brings its key as ``Authorization: Bearer KEY``. What a key opens:

    route   api_key set              admin_api_key set     neither
    PUBLIC  no key needed            no key needed         no key needed
    API     api_key, admin_api_key   as before it was set  no key needed
    ADMIN   api_key                  admin_api_key alone   requests of programs on this machine alone

The class of a route follows from the path that the router matches, never from anything that a header says.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING, Any

from ..managers.errors import RequestError
from .http_errors import error_response
from .routes import Access, access_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_HEAD_BYTES = 32 << 10  # of path, query and headers together

UNAUTHORIZED = "Unauthorized: this server wants a key, as `Authorization: Bearer KEY`."
FORBIDDEN = "Forbidden: this route wants the admin key."
FROM_ELSEWHERE = (
    "Forbidden: this route changes the server. Without --api-key or --admin-api-key it serves programs on the same machine alone."
)


class Door:
    """ASGI middleware: 401 without a key, 403 with one that does not do, 431 for a head that is too long."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, admin_api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await error_response(scope["path"], error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers)
        if size > MAX_HEAD_BYTES:
            text = f"Path and headers are longer than {MAX_HEAD_BYTES} bytes."
            return RequestError(text, status_code=431, err_type="RequestTooLargeError")
        access = access_of(scope["path"])
        if access is Access.PUBLIC or scope["method"] == "OPTIONS":
            return None
        given = _bearer(headers)
        if access is Access.ADMIN:
            return self._admin_refusal(scope, given)
        if self._api_key is None or _equal(given, self._api_key) or _equal(given, self._admin_api_key):
            return None
        return _unauthorized()

    def _admin_refusal(self, scope: Scope, given: bytes | None) -> RequestError | None:
        wanted = self._admin_api_key or self._api_key
        if wanted is None:
            return None if _is_local(scope) else _forbidden(FROM_ELSEWHERE)
        if _equal(given, wanted):
            return None
        if self._api_key is not None and _equal(given, self._api_key):
            return _forbidden(FORBIDDEN)
        return _unauthorized()


def _bearer(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None


def _equal(given: bytes | None, key: str | None) -> bool:
    """In a time that does not tell how much of the key was right."""
    return given is not None and key is not None and hmac.compare_digest(given, key.encode())


def _is_local(scope: Scope) -> bool:
    """From this machine, and not from a web page in a browser there."""
    client: Any = scope.get("client")
    if client is None or any(name == b"origin" for name, _ in scope["headers"]):
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _unauthorized() -> RequestError:
    return RequestError(UNAUTHORIZED, status_code=401, err_type="AuthenticationError")


def _forbidden(text: str) -> RequestError:
    return RequestError(text, status_code=403, err_type="PermissionDeniedError")
