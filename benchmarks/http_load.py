"""Requests over HTTP as a client sees them: sent, streamed, timed, and every failure kept.

Times are time.perf_counter() at the moment the bytes of a chunk are read from the socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import msgspec
import numpy as np
from workloads import Session, Turn

KEEPALIVE_SECONDS = 2.0  # below the servers' own (uvicorn: 5), so that no request goes to a connection that is being closed
NOT_SENT = "not sent: an earlier turn failed"


@dataclass(slots=True)
class Reply:
    """One request. It succeeded if ``error`` is None; else ``error`` is the kind of failure and ``message`` an example of it."""

    wanted: int  # output tokens asked for
    start: float = 0.0
    end: float = 0.0
    token_times: list[float] = field(default_factory=list)  # arrival of each chunk that carried tokens
    first_tokens: int = 1  # tokens of the first of these chunks
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = True  # the server told output_tokens; False: they are the number of chunks
    cached_tokens: int | None = None
    output_ids: list[int] = field(default_factory=list)
    error: str | None = None
    message: str = ""


class RequestFailed(Exception):
    """A request that the server refused or broke off."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class Backend(Protocol):
    """A wire format."""

    path: str

    def body(self, input_ids: list[int], output_len: int) -> dict[str, Any]:
        """The request."""

    def read(self, event: bytes, now: float, reply: Reply) -> None:
        """Take one event of the stream into the reply. Raises RequestFailed for an event that tells an error."""


# --- the native /generate ---------------------------------------------------------------------------------------------------------


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    finish_reason: _FinishReason | None = None


class _NativeEvent(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


class NativeBackend:
    """POST /generate. ``incremental`` asks for what is new only; a server that sends everything so far is understood as well."""

    path = "/generate"

    def __init__(self, *, ignore_eos: bool) -> None:
        self._ignore_eos = ignore_eos
        self._decode = msgspec.json.Decoder(_NativeEvent).decode

    def body(self, input_ids: list[int], output_len: int) -> dict[str, Any]:
        params = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": self._ignore_eos}
        return {"input_ids": input_ids, "sampling_params": params, "stream": True, "incremental": True}

    def read(self, event: bytes, now: float, reply: Reply) -> None:
        chunk = self._decode(event)
        if chunk.error is not None or chunk.meta_info is None:
            raise _told(chunk.error)
        meta = chunk.meta_info
        if meta.finish_reason is not None and meta.finish_reason.type == "abort":
            raise RequestFailed("aborted by the server", meta.finish_reason.message or "")
        if (new := meta.completion_tokens - reply.output_tokens) > 0:
            if not reply.token_times:
                reply.first_tokens = new
            reply.token_times.append(now)
        whole = len(chunk.output_ids) == meta.completion_tokens
        reply.output_ids = chunk.output_ids if whole else reply.output_ids + chunk.output_ids
        reply.prompt_tokens, reply.output_tokens = meta.prompt_tokens, meta.completion_tokens
        reply.cached_tokens = meta.cached_tokens


# --- OpenAI's completions ---------------------------------------------------------------------------------------------------------


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class OpenAIBackend:
    """POST /v1/completions with token ids as the prompt.

    A chunk carries tokens if it has text or ids: without ids, tokens that end inside a character arrive with the character.
    """

    path = "/v1/completions"

    def __init__(self, *, model: str, ignore_eos: bool, needs_ids: bool) -> None:
        """needs_ids: ask for the ids of the output too (an extension that Banyan and vLLM have)."""
        self._fixed: dict[str, Any] = {
            "model": model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self._fixed["ignore_eos"] = True
        if needs_ids:
            self._fixed["return_token_ids"] = True
        self._decode = msgspec.json.Decoder(_OpenAIEvent).decode

    def body(self, input_ids: list[int], output_len: int) -> dict[str, Any]:
        return {**self._fixed, "prompt": input_ids, "max_tokens": output_len}

    def read(self, event: bytes, now: float, reply: Reply) -> None:
        chunk = self._decode(event)
        if chunk.error is not None:
            raise _told(chunk.error)
        for choice in chunk.choices:
            if choice.finish_reason == "abort":
                raise RequestFailed("aborted by the server")
            if choice.text or choice.token_ids:
                reply.token_times.append(now)
            reply.output_ids += choice.token_ids or []
        if chunk.usage is not None:
            reply.prompt_tokens = chunk.usage.prompt_tokens
            reply.output_tokens = chunk.usage.completion_tokens or 0
            if chunk.usage.prompt_tokens_details is not None:
                reply.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens


# --- llama.cpp's completion -------------------------------------------------------------------------------------------------------


class _LlamaEvent(msgspec.Struct):
    tokens: list[int] = []
    stop: bool = False
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    error: Any = None


class LlamaBackend:
    """POST /completion of llama.cpp's server. The last event says ``stop``; there is no [DONE]."""

    path = "/completion"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_LlamaEvent).decode

    def body(self, input_ids: list[int], output_len: int) -> dict[str, Any]:
        fixed = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": True, "return_tokens": True, "stream": True}
        return {**fixed, "prompt": input_ids, "n_predict": output_len}

    def read(self, event: bytes, now: float, reply: Reply) -> None:
        chunk = self._decode(event)
        if chunk.error is not None:
            raise _told(chunk.error)
        if chunk.tokens and not chunk.stop:
            reply.token_times.append(now)
            reply.output_ids += chunk.tokens
        if chunk.stop:
            reply.prompt_tokens, reply.output_tokens, reply.end = chunk.tokens_evaluated, chunk.tokens_predicted, now


def _told(error: Any) -> RequestFailed:
    """The failure that a reply or an event tells as its ``error``."""
    if not isinstance(error, dict):
        return RequestFailed("unknown error" if error is None else "error", str(error))
    kind = " ".join(str(error[name]) for name in ("code", "type") if error.get(name) is not None)
    return RequestFailed(f"error {kind}".rstrip(), str(error.get("message", error)))


# --- one request ------------------------------------------------------------------------------------------------------------------


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[tuple[float, bytes]]:
    """(arrival, data) of each server-sent event, however the bytes are cut."""
    rest = b""
    async for chunk in chunks:
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


class Client:
    """Sends requests to one server."""

    def __init__(
        self, base_url: str, backend: Backend, *, headers: dict[str, str], timeout: float, keep_alive: bool = True
    ) -> None:
        """``timeout``: seconds that a whole request may take. ``keep_alive``: False opens a connection for each request, as needed
        for servers that close a connection after so many requests without saying so."""
        self._backend = backend
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"content-type": "application/json", "accept-encoding": "identity", **headers},
            timeout=httpx.Timeout(timeout),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None if keep_alive else 0, keepalive_expiry=KEEPALIVE_SECONDS
            ),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(self, input_ids: list[int], output_len: int, reply: Reply | None = None) -> Reply:
        """One request, filled into ``reply`` as it goes. What a server or a network does is its error and never raised."""
        content = msgspec.json.encode(self._backend.body(input_ids, output_len))
        reply = reply or Reply(wanted=output_len)
        reply.start = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(content, reply)
        except RequestFailed as error:
            reply.error, reply.message = error.kind, str(error)
        except msgspec.MsgspecError as error:
            reply.error, reply.message = "unreadable event", str(error)
        except TimeoutError:
            reply.error = "timeout"
        except httpx.HTTPError as error:
            reply.error, reply.message = type(error).__name__, str(error)
        reply.end = reply.end or time.perf_counter()
        return reply

    async def _exchange(self, content: bytes, reply: Reply) -> None:
        async with self._http.stream("POST", self._backend.path, content=content) as response:
            if response.status_code != 200:
                raise _refused(response.status_code, await response.aread())
            async with aclosing(events(response.aiter_raw())) as stream:
                async for now, event in stream:  # to the very end, or the connection could not be used again
                    if event == b"[DONE]":
                        reply.end = now
                    else:
                        self._backend.read(event, now, reply)
        if not reply.end:
            raise RequestFailed("stream ended without [DONE]")
        if not reply.token_times:
            raise RequestFailed("no tokens")
        if not reply.output_tokens:
            reply.output_tokens, reply.counted = len(reply.token_times), False


def _refused(status: int, body: bytes) -> RequestFailed:
    try:
        error = msgspec.json.decode(body)
        fields = error.get("error", error)
        return RequestFailed(f"HTTP {status} {fields.get('type', '')}".rstrip(), str(fields.get("message", "")))
    except (msgspec.MsgspecError, AttributeError):
        return RequestFailed(f"HTTP {status}", body[:200].decode(errors="replace"))


# --- many requests ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """What a load came to."""

    replies: list[Reply]
    duration: float  # seconds from the first request to the end of the last
    late: float | None  # most seconds that a session began after its arrival (waiting for its turn counts); None: all at once
    client_cpu: float  # CPU seconds of this process


async def run_sessions(
    client: Client, sessions: Sequence[Session], arrivals: np.ndarray, *, max_concurrency: int | None, needs_ids: bool
) -> Run:
    """Start each session at its time, as soon as fewer than max_concurrency are under way, in order. Every turn gets a Reply."""
    gate = asyncio.Semaphore(max_concurrency or len(sessions))
    begin, cpu = time.perf_counter(), time.process_time()
    late = 0.0

    async def one(session: Session, arrival: float) -> list[Reply]:
        nonlocal late
        await asyncio.sleep(begin + arrival - time.perf_counter())
        async with gate:
            late = max(late, time.perf_counter() - begin - arrival)
            return await run_session(client, session, needs_ids=needs_ids)

    nested = await asyncio.gather(*(one(session, arrival) for session, arrival in zip(sessions, arrivals.tolist(), strict=True)))
    replies = [reply for part in nested for reply in part]
    sent = [reply for reply in replies if reply.error != NOT_SENT]
    duration = max(reply.end for reply in sent) - min(reply.start for reply in sent)
    return Run(replies, duration, late if arrivals.any() else None, time.process_time() - cpu)


async def run_session(client: Client, session: Sequence[Turn], *, needs_ids: bool) -> list[Reply]:
    """Send the turns, each with everything before it. After a failure the rest cannot be asked and counts as failed too."""
    history: list[int] = []
    replies: list[Reply] = []
    for turn in session:
        if replies and replies[-1].error is not None:
            replies.append(Reply(wanted=turn.output_len, error=NOT_SENT))
            continue
        history = history + turn.input_ids
        reply = await client.send(history, turn.output_len)
        if needs_ids and reply.error is None and len(reply.output_ids) != reply.output_tokens:
            reply.error = "the server does not return the output's token ids, which the next turn is made of"
        history = history + reply.output_ids
        replies.append(reply)
    return replies
