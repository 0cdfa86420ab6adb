"""The native routes: /generate and the routes that inform, probe and control."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Literal, get_args

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from ..managers.errors import BanyanError, RequestError
from ..managers.generation import GenerateInput
from ..managers.io_struct import ControlReply
from ..managers.request_gate import QUEUE_FULL_MESSAGE
from ..managers.tokenizer_manager import TokenizerManager
from . import info
from .generate_schema import GENERATE_BODY
from .http_io import JSONReply, apply_headers, event_stream, gone, parse_body, unless_disconnected
from .server_state import state_of

PROBE_TIMEOUT = 20.0  # seconds that /health_generate waits for its token
STATE_TIMEOUT = 10.0  # seconds that /server_info waits for the scheduler
MAX_FLUSH_WAIT = 3600.0

PauseMode = Literal["abort", "retract", "in_place"]

router = APIRouter()


def install(app: FastAPI) -> None:
    """Add the native routes."""
    app.include_router(router)


# --- generation -------------------------------------------------------------------------------------------------------------------


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.post("/generate", openapi_extra=_body(GENERATE_BODY))
@router.put("/generate", openapi_extra=_body(GENERATE_BODY))
async def generate(request: Request) -> Response:
    """Complete one prompt or a batch of prompts."""
    tm = state_of(request).serving()
    query = await parse_body(request, GenerateInput.parse)
    apply_headers(request, query)
    if query.stream:
        return await event_stream(request, _chunks(tm, query), openai=False)
    result = await unless_disconnected(request, tm.generate(query))
    return gone() if result is None else JSONReply(result)


async def _chunks(tm: TokenizerManager, query: GenerateInput) -> AsyncGenerator[dict[str, Any]]:
    generation = await tm.start(query)
    try:
        first = True
        async for chunk in tm.stream(generation, query):
            if first and generation.is_single:
                _check_served(chunk["meta_info"]["finish_reason"])
            first = False
            yield chunk
    finally:
        generation.abort()


def _check_served(reason: dict[str, Any] | None) -> None:
    """A stream that was refused before its first token is an HTTP error: no header is sent yet."""
    if reason is not None and reason["type"] == "abort" and "status_code" in reason:
        raise RequestError(reason["message"], status_code=reason["status_code"], err_type=reason.get("err_type", "AbortError"))


# --- probes -----------------------------------------------------------------------------------------------------------------------


@router.get("/health", response_class=PlainTextResponse)
async def health(request: Request) -> Response:
    """200 when requests are served, told from heartbeats, so neither a long prefill nor a full queue makes it fail."""
    reason = state_of(request).unserving_reason()
    return PlainTextResponse("") if reason is None else PlainTextResponse(reason, status_code=503)


@router.get("/livez", response_class=PlainTextResponse)
async def livez(request: Request) -> Response:
    """200 unless a restart is the only help."""
    state = state_of(request)
    if state.tm is None or (found := state.tm.health()).alive:
        return PlainTextResponse("")
    return PlainTextResponse(found.reason, status_code=503)


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """200 when new requests are taken."""
    state = state_of(request)
    reason = state.unready_reason()
    body = {"status": state.phase, "reason": reason}
    return JSONReply(body, status_code=200 if reason is None else 503)


@router.get("/health_generate", response_class=PlainTextResponse)
async def health_generate(request: Request) -> Response:
    """200 when one token could be generated in time."""
    state = state_of(request)
    if (reason := state.unready_reason()) is not None:
        return PlainTextResponse(reason, status_code=503)
    probe = GenerateInput(
        input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0}, rid=f"HEALTH_CHECK_{uuid.uuid4().hex}"
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            await unless_disconnected(request, state.serving().generate(probe, probe=True))
    except (TimeoutError, BanyanError) as error:
        if str(error) == QUEUE_FULL_MESSAGE:  # overload is no illness
            return PlainTextResponse("")
        return PlainTextResponse(str(error) or f"no token within {PROBE_TIMEOUT:.0f} s", status_code=503)
    return PlainTextResponse("")


# --- information ------------------------------------------------------------------------------------------------------------------


@router.get("/")
@router.head("/", include_in_schema=False)
async def root() -> Response:
    """Who answers here."""
    return JSONReply("Banyan is running")


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """The model that is served."""
    return JSONReply(info.model_info(state_of(request).engine()))


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Every option with its value, what was derived, and the scheduler's state. Never a secret."""
    state = state_of(request)
    tm = state.engine()
    try:
        async with asyncio.timeout(STATE_TIMEOUT):
            body = await info.server_info(tm, state.args, status=state.phase, startup_time=state.startup_time)
    except TimeoutError:
        raise RequestError("The scheduler does not answer.", status_code=503, err_type="ServiceUnavailableError") from None
    return JSONReply(body)


# --- control ----------------------------------------------------------------------------------------------------------------------


@router.get("/flush_cache", response_class=PlainTextResponse)
@router.post("/flush_cache", response_class=PlainTextResponse)
async def flush_cache(request: Request, timeout: float = 0.0) -> Response:
    """Empty the prefix cache; refused while requests run or wait, after waiting ``timeout`` seconds for idleness."""
    if not (math.isfinite(timeout) and 0 <= timeout <= MAX_FLUSH_WAIT):
        raise RequestError(f"timeout must be in [0, {MAX_FLUSH_WAIT:.0f}] seconds, got {timeout}.", param="timeout")
    reply = await unless_disconnected(request, state_of(request).engine().flush_cache(timeout))
    if reply is None:
        return gone()
    if reply.success:
        return PlainTextResponse(f"{reply.message or 'Cache flushed.'}\n")
    return PlainTextResponse(reply.message or "Flush cache failed.\n", status_code=400)


class AbortInput(msgspec.Struct, kw_only=True):
    """Body of /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None

    @classmethod
    def parse(cls, values: dict[str, Any]) -> AbortInput:
        """Check the types. Raises RequestError that names the field."""
        try:
            query = msgspec.convert(values, cls, strict=True)
        except msgspec.ValidationError as error:
            raise RequestError(str(error), param=str(error).rpartition("`$.")[2].rstrip("`") or None) from None
        if not query.rid and not query.abort_all:
            raise RequestError("rid must not be empty, unless abort_all is true.", param="rid")
        return query


_ABORT_BODY = {"type": "object", "properties": {"rid": {"type": "string"}, "abort_all": {"type": "boolean", "default": False}}}


@router.post("/abort_request", openapi_extra=_body(_ABORT_BODY))
async def abort_request(request: Request) -> Response:
    """Abort the request with exactly this rid (and what it was expanded to), or all; says how many choices were aborted."""
    tm = state_of(request).engine()
    query = await parse_body(request, AbortInput.parse)
    return JSONReply({"aborted": tm.abort(query.rid or "", bool(query.abort_all))})


class PauseInput(msgspec.Struct, kw_only=True):
    """Body of /pause_generation."""

    mode: PauseMode | None = None

    @classmethod
    def parse(cls, values: dict[str, Any]) -> PauseInput:
        """Check the mode. Raises RequestError that names it."""
        try:
            return msgspec.convert(values, cls, strict=True)
        except msgspec.ValidationError:
            raise RequestError(f"mode must be one of {', '.join(get_args(PauseMode))}.", param="mode") from None


_PAUSE_BODY = {
    "type": "object",
    "properties": {"mode": {"type": "string", "enum": list(get_args(PauseMode)), "default": "abort"}},
}


@router.post("/pause_generation", openapi_extra=_body(_PAUSE_BODY))
async def pause_generation(request: Request) -> Response:
    """Begin no further step. Answers when none is under way; requests that come meanwhile are queued until /continue_generation."""
    tm = state_of(request).engine()
    query = await parse_body(request, PauseInput.parse)
    return _done(await tm.pause_generation(query.mode or "abort"))


@router.post("/continue_generation", openapi_extra=_body({"type": "object"}))
async def continue_generation(request: Request) -> Response:
    """End a pause."""
    tm = state_of(request).engine()
    await parse_body(request, dict)
    return _done(await tm.continue_generation())


def _done(reply: ControlReply) -> Response:
    if not reply.success:
        raise RequestError(reply.message, status_code=409, err_type="ConflictError")
    return JSONReply({"message": reply.message, "status": "ok"})
