"""POST /v1/score"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from ..managers.scoring import ScoreInput, score
from .http_io import JSONReply, gone, parse_body, require_json, unless_disconnected
from .openai.replies import check_model
from .server_state import state_of
from .struct_body import body_of, struct_parser

router = APIRouter()


@router.post("/v1/score", openapi_extra=body_of(ScoreInput))
async def scores(request: Request) -> Response:
    """How likely each label token comes next after the query and each item."""
    require_json(request)
    tm = state_of(request).serving()
    query = await parse_body(request, struct_parser(ScoreInput))
    model = check_model(tm, query.model)
    found = await unless_disconnected(request, score(tm, query))
    if found is None:
        return gone()
    usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens, "completion_tokens": 0}
    return JSONReply({"object": "scoring", "model": model, "scores": found.scores, "usage": usage})


def install(app: FastAPI) -> None:
    """Add the route."""
    app.include_router(router)
