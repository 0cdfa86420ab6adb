"""What load balancers ask: how much a server has to do. Told from heartbeats, so it costs the scheduler nothing."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from ..managers.errors import RequestError
from ..managers.tokenizer_manager import TokenizerManager
from ..version import __version__
from .http_io import JSONReply
from .server_state import state_of

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")

router = APIRouter()


def loads_of(tm: TokenizerManager, sections: set[str]) -> dict[str, Any]:
    """The loads of the one scheduler in SGLang's names; sections of what this server has not are empty."""
    health, info = tm.health(), tm.info
    used, total = health.num_used_tokens, max(info.max_total_num_tokens, 1)
    load: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": health.num_running,
        "num_waiting_reqs": health.num_waiting,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": info.max_total_num_tokens,
        "max_running_requests": info.max_running_requests,
        "token_usage": round(used / total, 4),
        "gen_throughput": round(health.gen_throughput, 2),
        "cache_hit_rate": round(health.cache_hit_rate, 4),
        "utilization": round(health.num_running / max(info.max_running_requests, 1), 4),
    }
    extra: dict[str, tuple[str, dict[str, Any]]] = {
        "memory": ("memory", {"token_capacity": info.max_total_num_tokens}),
        "disagg": ("disaggregation", {"mode": "null"}),
        "queues": ("queues", {"waiting": health.num_waiting}),
    }
    return load | {name: value for section, (name, value) in extra.items() if section in sections or "all" in sections}


@router.get("/v1/loads")
async def loads(request: Request, dp_rank: int | None = None, include: str = "all", format: str = "json") -> Response:
    """Requests and tokens that the scheduler holds. include: comma list of sections; format: json or prometheus."""
    tm = state_of(request).engine()
    sections = {name.strip() for name in include.split(",")}
    if not sections <= set(SECTIONS):
        raise RequestError(f"include must name some of {', '.join(SECTIONS)}.", param="include")
    if format not in ("json", "prometheus"):
        raise RequestError("format must be json or prometheus.", param="format")
    if dp_rank not in (None, 0):
        raise RequestError("dp_rank must be 0: there is one scheduler.", param="dp_rank")
    load = loads_of(tm, sections)
    if format == "prometheus":
        lines = [f'sglang_{name}{{dp_rank="0"}} {value}' for name, value in load.items() if isinstance(value, int | float)]
        return PlainTextResponse("\n".join(lines) + "\n")
    now = datetime.now(UTC).isoformat()
    return JSONReply({"timestamp": now, "version": __version__, "loads": [load]})


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """The load in the words of older routers."""
    load = loads_of(state_of(request).engine(), set())
    return JSONReply(
        [
            {
                "dp_rank": 0,
                "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
                "ts_tic": load["timestamp"],
            }
        ]
    )


def install(app: FastAPI) -> None:
    """Add the routes."""
    app.include_router(router)
