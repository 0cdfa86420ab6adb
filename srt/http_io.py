"""Bodies in, events out, and the client's disconnection noticed the moment the socket tells it."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.responses import JSONResponse, Response

from ..managers.errors import RequestError
from .http_errors import as_request_error, error_body

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
BODY_STALL = 20.0  # seconds between two parts of a body
THREAD_BYTES = 128 << 10  # bodies above are parsed off the event loop
CLIENT_GONE = 499  # never seen by a client: it has gone
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


class JSONReply(JSONResponse):
    """A JSON response, encoded by msgspec."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


async def body_parts(request: Request, limit: int) -> AsyncGenerator[bytes]:
    """The body as it comes.

    Raises RequestError 413 as soon as it is known to be longer than ``limit`` bytes, 408 if its next part does not come, 415 if it
    is compressed.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        text = f"Content-Encoding {encoding[:40]!r} is not supported; send the body as it is."
        raise RequestError(text, param="Content-Encoding", status_code=415, err_type="UnsupportedMediaTypeError")
    length = request.headers.get("content-length", "")
    size, received = int(length) if length.isdigit() else 0, 0
    stream = request.stream()
    while size <= limit:
        try:
            async with asyncio.timeout(BODY_STALL):
                part = await anext(stream, None)
        except TimeoutError:
            message = f"Nothing more of the body came for {BODY_STALL:.0f} s."
            raise RequestError(message, status_code=408, err_type="RequestTimeoutError") from None
        if part is None:
            return
        received += len(part)
        size = max(size, received)
        yield part
    raise RequestError(f"The body is longer than {limit} bytes.", status_code=413, err_type="RequestTooLargeError")


async def read_body(request: Request) -> bytes:
    """The whole body. Raises RequestError as ``body_parts`` does."""
    return b"".join([part async for part in body_parts(request, MAX_BODY_BYTES)])


async def parse_body(request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
    """Decode the body as a JSON object and hand it to ``parse``; big ones in a thread, so that the loop goes on."""
    body = await read_body(request)
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(lambda: parse(json_object(body)))
    return parse(json_object(body))


def json_object(body: bytes) -> dict[str, Any]:
    """Strict JSON (no NaN, no Infinity, no lone surrogates) whose top is an object, or RequestError."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, got {type(value).__name__}.")
    return value


class HasService(Protocol):
    """A request body with the fields that headers may set as well."""

    routing_key: str | None
    timeout: float | None
    data_parallel_rank: int | None


def apply_headers(request: Request, body: HasService) -> None:
    """Lay x-request-timeout (seconds; the shorter one counts), x-smg-routing-key and x-data-parallel-rank over a body.

    Raises RequestError for a bad value.
    """
    rank = request.headers.get("x-data-parallel-rank")
    if rank is not None:
        if not re.fullmatch(r"[0-9]{1,6}", rank):
            raise RequestError(f"X-Data-Parallel-Rank must be the number of a replica, got {rank!r}.", param="X-Data-Parallel-Rank")
        body.data_parallel_rank = int(rank)
    given = request.headers.get("x-request-timeout")
    if given is not None:
        seconds = _seconds(given)
        body.timeout = seconds if body.timeout is None else min(body.timeout, seconds)
    body.routing_key = request.headers.get("x-smg-routing-key", body.routing_key)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(f"X-Request-Timeout must be a positive number of seconds, got {text!r}.", param="X-Request-Timeout")
    return seconds


def require_json(request: Request) -> None:
    """OpenAI routes want ``content-type: application/json``."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError("Content-Type must be application/json.")


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Await ``work``, but cancel it and return None as soon as the client goes."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, watcher)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def gone() -> Response:
    """What a handler returns for a client that is no longer there."""
    return Response(status_code=CLIENT_GONE)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def event_stream(
    request: Request, chunks: AsyncGenerator[Any], *, openai: bool, headers: dict[str, str] | None = None
) -> Response:
    """Stream the chunks as events. No header is sent before the first is there, so what fails until then is a plain HTTP error."""
    try:
        first = await unless_disconnected(request, _next(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    if first is None:
        await chunks.aclose()
        return gone()
    return EventStream(first, chunks, openai=openai, headers=headers)


async def _next(chunks: AsyncGenerator[Any]) -> Any:
    return await anext(chunks)


class EventStream(Response):
    """A response of server-sent events that ends with [DONE], or with an error event and without it.

    The chunks' generator is closed as soon as the client goes, which aborts the request behind it.
    """

    media_type = "text/event-stream"

    def __init__(self, first: Any, chunks: AsyncGenerator[Any], *, openai: bool, headers: dict[str, str] | None = None) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._chunks = chunks
        self._openai = openai
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            await _cancel(writer, watcher)
            await self._chunks.aclose()

    async def _write(self, send: Send) -> None:
        async def put(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await put(event(self._first))
        last = DONE
        try:
            async for chunk in self._chunks:
                await put(event(chunk))
        except Exception as error:  # headers are out: the error can only be told in the stream
            known = as_request_error(error)
            if known.status_code == 500:
                logger.exception("a stream failed")
            last = event(error_body(known, openai=self._openai))
        await put(last)
        await put(b"", more=False)
