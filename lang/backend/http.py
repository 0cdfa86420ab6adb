"""A small HTTP client on the standard library: JSON, server-sent events, connections that are kept."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
import urllib.parse
from collections.abc import Generator
from typing import Any

import msgspec

from ..errors import BackendError

KEEP_SECONDS = 4.0  # servers close idle connections after 5
DATA, DONE = b"data:", b"[DONE]"
STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class HttpClient:
    """Calls to one server, from any number of threads. verify: a file of CA certificates, False for none, None for the system's.

    Raises BackendError for a server that cannot be reached and for any status but 200.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, verify: str | bool | None = None, timeout: float | None = None
    ) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the base URL must be http(s)://host[:port], got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._parts = parts
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json; charset=utf-8"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._context = _context(verify) if parts.scheme == "https" else None
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer; the text itself where it is no JSON."""
        connection, response = self._send(method, path, body)
        try:
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise BackendError(f"{self.base_url}{path}: {error or type(error).__name__}") from error
        self._keep(connection, response)
        if response.status != 200:
            raise BackendError(f"{path}: {response.status}: {message_of(data)}", status=response.status)
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError:
            return data.decode(errors="replace")

    def events(self, path: str, body: Any) -> Generator[Any]:
        """The decoded data of each event until [DONE]. Leaving early closes the connection, which aborts the request."""
        connection, response = self._send("POST", path, body)
        done = False
        try:
            if response.status != 200:
                raise BackendError(f"{path}: {response.status}: {message_of(response.read())}", status=response.status)
            for line in response:
                if not line.startswith(DATA):
                    continue
                data = line[len(DATA) :].strip()
                if data == DONE:
                    done = True
                    break
                yield msgspec.json.decode(data)
            if not done:
                raise BackendError(f"{path}: the stream ended before [DONE]")
            response.read()
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise BackendError(f"{self.base_url}{path}: {error or type(error).__name__}") from error
        finally:
            if done:
                self._keep(connection, response)
            else:
                connection.close()

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def _send(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        data = None if body is None else msgspec.json.encode(body)
        target = self._parts.path.rstrip("/") + path
        kept = self._take()
        for connection in (kept, self._connect()) if kept is not None else (self._connect(),):
            try:
                connection.request(method, target, body=data, headers=self._headers)
                return connection, connection.getresponse()
            except STALE as error:  # a kept connection may have been closed by the server just now
                connection.close()
                if connection is not kept:
                    raise BackendError(f"{self.base_url}{path}: {error or type(error).__name__}") from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                raise BackendError(f"{self.base_url}{path}: {error or type(error).__name__}") from error
        raise AssertionError("unreachable")

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._context is not None:
            return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout)

    def _take(self) -> http.client.HTTPConnection | None:
        oldest = time.monotonic() - KEEP_SECONDS
        stale = []
        with self._lock:
            while self._idle:
                since, connection = self._idle.pop()
                if since >= oldest:
                    return connection
                stale.append(connection)
        for connection in stale:
            connection.close()
        return None

    def _keep(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        if response.will_close:
            connection.close()
            return
        with self._lock:
            self._idle.append((time.monotonic(), connection))


def message_of(data: bytes) -> str:
    """What an error body says, in any of the shapes that servers use."""
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data.decode(errors="replace").strip() or "no message"
    return error_text(body)


def error_text(body: Any) -> str:
    """The message inside a decoded error."""
    while isinstance(body, dict):
        inner = body.get("error", body.get("message", body.get("detail")))
        if inner is None:
            break
        body = inner
    return str(body)


def _context(verify: str | bool | None) -> ssl.SSLContext:
    if verify is False:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
