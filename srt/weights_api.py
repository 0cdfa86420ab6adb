"""Routes for trainers and developers: weights, memory, profiles. Weights travel as safetensors, never as pickles."""

from __future__ import annotations

import base64
import binascii
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from ..managers.errors import RequestError
from ..managers.io_struct import ControlReply
from ..managers.model_service import (
    FromDiskInput,
    FromGroupInput,
    GroupInput,
    InitGroupInput,
    ModelService,
    ProfileInput,
    Tag,
    UpdateInput,
)
from .http_errors import blotted
from .http_io import JSONReply, body_parts, json_object, parse_body, read_body
from .server_state import state_of
from .struct_body import body_of, parse_struct, struct_parser

MAX_TENSOR_BYTES = 256 << 30
RAW = "application/octet-stream"

T = TypeVar("T")

router = APIRouter()


class FromTensorInput(UpdateInput, kw_only=True):
    """Body of /update_weights_from_tensor: files in safetensors format as base64, under the names of a checkpoint."""

    serialized_named_tensors: list[str]


class VersionInput(msgspec.Struct, kw_only=True):
    """Body of /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class NameInput(msgspec.Struct, kw_only=True):
    """Body of /get_weights_by_name."""

    name: str
    truncate_size: int = 100


class TagsInput(msgspec.Struct, kw_only=True):
    """Body of the routes for memory; null: all of it."""

    tags: list[Tag] | None = None


async def _optional(request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
    """A body that may be left out, or null."""
    body = (await read_body(request)).strip()
    return parse({} if body in (b"", b"null") else json_object(body))


def _service(request: Request) -> ModelService:
    state = state_of(request)
    state.engine()
    return state.model_service()


def _told(reply: ControlReply) -> Response:
    body = {"success": reply.success, "message": blotted(reply.message), **reply.state}
    return JSONReply(body, status_code=200 if reply.success else 400)


@router.post("/update_weights_from_disk", openapi_extra=body_of(FromDiskInput))
async def update_weights_from_disk(request: Request) -> Response:
    """Load another checkpoint; answers when the next request is computed with it."""
    service = _service(request)
    return _told(await service.update_from_disk(await parse_body(request, struct_parser(FromDiskInput))))


@router.post("/update_weights_from_tensor", openapi_extra=body_of(FromTensorInput))
async def update_weights_from_tensor(request: Request) -> Response:
    """Replace some tensors. With content-type application/octet-stream the body is one safetensors file, and the other fields are
    in the query."""
    service = _service(request)
    path = service.spool()
    try:
        if request.headers.get("content-type", "").partition(";")[0].strip() == RAW:
            query = _from_query(dict(request.query_params))
            await _receive(request, path)
            return _told(await service.update_from_tensors(query, str(path.parent)))
        given = await parse_body(request, struct_parser(FromTensorInput))
        replies = [await service.update_from_tensors(given, str(part.parent)) for part in _decoded(service, path, given)]
    except BaseException:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise
    return _told(next((reply for reply in replies if not reply.success), replies[-1]))


def _from_query(values: dict[str, str]) -> UpdateInput:
    given: dict[str, Any] = dict(values)
    for name in ("flush_cache", "abort_all_requests"):
        if name in given:
            given[name] = {"true": True, "false": False}.get(given[name].lower(), given[name])
    return parse_struct(UpdateInput, given)


async def _receive(request: Request, path: Path) -> None:
    with path.open("wb") as file:
        async for part in body_parts(request, MAX_TENSOR_BYTES):
            file.write(part)


def _decoded(service: ModelService, path: Path, given: FromTensorInput) -> list[Path]:
    """One file per entry, all of them checked to be base64 before the first is used."""
    if not given.serialized_named_tensors:
        raise RequestError("serialized_named_tensors must not be empty.", param="serialized_named_tensors")
    try:
        parts = [base64.b64decode(text, validate=True) for text in given.serialized_named_tensors]
    except (binascii.Error, ValueError):
        raise RequestError("serialized_named_tensors must be base64.", param="serialized_named_tensors") from None
    paths = [path, *(service.spool() for _ in parts[1:])]
    for place, part in zip(paths, parts, strict=True):
        place.write_bytes(part)
    return paths


@router.post("/update_weight_version", openapi_extra=body_of(VersionInput))
async def update_weight_version(request: Request) -> Response:
    """Rename the weights."""
    service = _service(request)
    query = await parse_body(request, struct_parser(VersionInput))
    return _told(await service.set_version(query.new_version, abort_all=query.abort_all_requests))


@router.post("/init_weights_update_group", openapi_extra=body_of(InitGroupInput))
async def init_weights_update_group(request: Request) -> Response:
    """Join a group in which a trainer broadcasts weights; answers when all its members are there."""
    service = _service(request)
    return _told(await service.init_group(await parse_body(request, struct_parser(InitGroupInput))))


@router.post("/destroy_weights_update_group", openapi_extra=body_of(GroupInput))
async def destroy_weights_update_group(request: Request) -> Response:
    """Leave a group."""
    service = _service(request)
    query = await parse_body(request, struct_parser(GroupInput))
    return _told(await service.destroy_group(query.group_name))


@router.post("/update_weights_from_distributed", openapi_extra=body_of(FromGroupInput))
async def update_weights_from_distributed(request: Request) -> Response:
    """Replace some tensors by what the trainer of a group broadcasts now."""
    service = _service(request)
    return _told(await service.update_from_group(await parse_body(request, struct_parser(FromGroupInput))))


@router.get("/get_weights_by_name", include_in_schema=False)
@router.post("/get_weights_by_name", openapi_extra=body_of(NameInput))
async def get_weights_by_name(request: Request) -> Response:
    """The first values of a tensor."""
    service = _service(request)
    query = await parse_body(request, struct_parser(NameInput))
    return JSONReply(await service.weights_by_name(query.name, query.truncate_size))


@router.get("/release_memory_occupation", include_in_schema=False)
@router.post("/release_memory_occupation", openapi_extra=body_of(TagsInput, required=False))
async def release_memory_occupation(request: Request) -> Response:
    """Give memory back; nothing is computed until it is resumed."""
    return await _memory(request, release=True)


@router.get("/resume_memory_occupation", include_in_schema=False)
@router.post("/resume_memory_occupation", openapi_extra=body_of(TagsInput, required=False))
async def resume_memory_occupation(request: Request) -> Response:
    """Take memory again: the same weights, an empty cache."""
    return await _memory(request, release=False)


async def _memory(request: Request, *, release: bool) -> Response:
    service = _service(request)
    query = await _optional(request, struct_parser(TagsInput))
    reply = await service.memory(query.tags, release=release)
    if not reply.success:
        raise RequestError(reply.message)
    return JSONReply(None)


def _profile(values: dict[str, Any]) -> ProfileInput:
    """Benchmarks send the numbers of steps as strings."""
    given = {name: values.get(name) for name in ("start_step", "num_steps")}
    numbers = {name: int(text) for name, text in given.items() if isinstance(text, str) and re.fullmatch("[0-9]{1,9}", text)}
    return parse_struct(ProfileInput, {**values, **numbers})


@router.get("/start_profile", response_class=PlainTextResponse, include_in_schema=False)
@router.post("/start_profile", response_class=PlainTextResponse, openapi_extra=body_of(ProfileInput, required=False))
async def start_profile(request: Request) -> Response:
    """Record forward steps; a Chrome trace per rank is written when it ends."""
    service = _service(request)
    reply = await service.start_profile(await _optional(request, _profile))
    return _text(reply, "Start profiling.\n")


@router.get("/stop_profile", response_class=PlainTextResponse, include_in_schema=False)
@router.post("/stop_profile", response_class=PlainTextResponse)
async def stop_profile(request: Request) -> Response:
    """End the profile; the answer tells the path of the trace."""
    reply = await _service(request).stop_profile()
    return _text(reply, f"Stop profiling. The trace is {reply.message}\n")


def _text(reply: ControlReply, text: str) -> Response:
    if not reply.success:
        raise RequestError(reply.message)
    return PlainTextResponse(text)


def install(app: FastAPI) -> None:
    """Add the routes."""
    app.include_router(router)
