"""Routes for whoever runs the server: the startup probe, draining, and a dump of what it does."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from ..managers.errors import BanyanError, RequestError
from ..managers.processes import stacks
from .http_io import JSONReply
from .server_state import state_of

MAX_DRAIN_WAIT = 3600.0
STATE_TIMEOUT = 5.0  # seconds that a dump waits for a scheduler that may hang

router = APIRouter()


def install(app: FastAPI) -> None:
    """Add the routes."""
    app.include_router(router)


@router.get("/startupz", response_class=PlainTextResponse)
async def startupz(request: Request) -> Response:
    """200 once the warm-up is over, for good."""
    state = state_of(request)
    return PlainTextResponse("") if state.startup_time is not None else PlainTextResponse("starting", status_code=503)


@router.post("/drain")
async def drain(request: Request, timeout: float = 0.0) -> Response:
    """Take no new requests until DELETE /drain, and wait up to ``timeout`` seconds for those that are alive."""
    if not (math.isfinite(timeout) and 0 <= timeout <= MAX_DRAIN_WAIT):
        raise RequestError(f"timeout must be in [0, {MAX_DRAIN_WAIT:.0f}] seconds, got {timeout}.", param="timeout")
    tm = state_of(request).engine()
    tm.draining = True
    await tm.wait_idle(timeout)
    return JSONReply({"status": "draining" if tm.num_live else "drained", "num_live": tm.num_live})


@router.delete("/drain")
async def end_drain(request: Request) -> Response:
    """Take new requests again. 409 if the server is about to end."""
    state = state_of(request)
    tm = state.engine()
    if state.leaving:
        raise RequestError("The server is shutting down.", status_code=409, err_type="ConflictError")
    tm.draining = False
    return JSONReply({"status": state.phase, "num_live": tm.num_live})


@router.post("/dump")
async def dump(request: Request) -> Response:
    """Stacks of all processes, health, the scheduler's state and last turns. What a scheduler that hangs cannot tell is null."""
    state = state_of(request)
    tm, body = state.engine(), dict[str, Any]()
    body["health"] = msgspec.to_builtins(tm.health())
    if state.processes is not None:
        directory, pids = tm.config.ipc.directory, {"main": os.getpid(), **state.processes()}
        body["stacks"] = await asyncio.to_thread(stacks.collect, directory, pids)
    try:
        async with asyncio.timeout(STATE_TIMEOUT):
            body["state"] = await tm.internal_state()
            body["turns"] = await tm.last_turns()
    except (TimeoutError, BanyanError):
        body.setdefault("state", None)
        body["turns"] = None
    return JSONReply(body)
