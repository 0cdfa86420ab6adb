"""What load balancers ask: how much a server has to do. Told from heartbeats, so it costs the scheduler nothing."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from ..managers.errors import RequestError
from ..managers.io_struct import Heartbeat
from ..managers.tokenizer_manager import TokenizerManager
from ..version import __version__
from .http_io import JSONReply
from .server_state import state_of

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")

router = APIRouter()


def loads_of(tm: TokenizerManager, sections: set[str]) -> list[dict[str, Any]]:
    """The loads of each replica that is up, in SGLang's names; sections of what this server has not are empty."""
    now = time.time()
    return [{"timestamp": now, "dp_rank": rank} | _load_of(tm, beat, sections) for rank, beat in tm.health().replicas.items()]


def _load_of(tm: TokenizerManager, beat: Heartbeat, sections: set[str]) -> dict[str, Any]:
    info = tm.info
    used, total = beat.num_used_tokens, max(info.max_total_num_tokens, 1)
    max_running = info.max_running_requests // info.dp_size
    load: dict[str, Any] = {
        "num_running_reqs": beat.num_running,
        "num_waiting_reqs": beat.num_waiting,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": info.max_total_num_tokens,
        "max_running_requests": max_running,
        "token_usage": round(used / total, 4),
        "gen_throughput": round(beat.gen_throughput, 2),
        "cache_hit_rate": round(beat.cache_hit_rate, 4),
        "utilization": round(beat.num_running / max(max_running, 1), 4),
    }
    extra: dict[str, tuple[str, dict[str, Any]]] = {
        "memory": ("memory", {"token_capacity": info.max_total_num_tokens}),
        "disagg": ("disaggregation", {"mode": "null"}),
        "queues": ("queues", {"waiting": beat.num_waiting}),
    }
    return load | {name: value for section, (name, value) in extra.items() if section in sections or "all" in sections}


@router.get("/v1/loads")
async def loads(request: Request, dp_rank: int | None = None, include: str = "all", format: str = "json") -> Response:
    """Requests and tokens that each replica's scheduler holds; one that is down has no entry. include: comma list of sections;
    format: json or prometheus."""
    tm = state_of(request).engine()
    sections = {name.strip() for name in include.split(",")}
    if not sections <= set(SECTIONS):
        raise RequestError(f"include must name some of {', '.join(SECTIONS)}.", param="include")
    if format not in ("json", "prometheus"):
        raise RequestError("format must be json or prometheus.", param="format")
    if dp_rank is not None and not 0 <= dp_rank < tm.info.dp_size:
        raise RequestError(f"dp_rank must be in [0, {tm.info.dp_size}), got {dp_rank}.", param="dp_rank")
    found = [load for load in loads_of(tm, sections) if dp_rank in (None, load["dp_rank"])]
    if format == "prometheus":
        lines = [
            f'sglang_{name}{{dp_rank="{load["dp_rank"]}"}} {value}'
            for load in found
            for name, value in load.items()
            if isinstance(value, int | float)
        ]
        return PlainTextResponse("\n".join(lines) + "\n")
    now = datetime.now(UTC).isoformat()
    return JSONReply({"timestamp": now, "version": __version__, "loads": found})


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """The load in the words of older routers."""
    return JSONReply(
        [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
                "ts_tic": load["timestamp"],
            }
            for load in loads_of(state_of(request).engine(), set())
        ]
    )


def install(app: FastAPI) -> None:
    """Add the routes."""
    app.include_router(router)
