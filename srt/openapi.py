"""The OpenAPI document: FastAPI's, made true. Bodies are parsed by hand, errors have one shape, streams are events."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from .openai.protocol import BODIES

REF = "#/components/schemas/{model}"
STREAMING_PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
FASTAPI_SCHEMAS = ("HTTPValidationError", "ValidationError")  # of a 422 that is never sent

_ERROR_FIELDS = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": "integer"},
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(_ERROR_FIELDS), "properties": _ERROR_FIELDS}},
}
FAILURE = {
    "description": "The request is refused, or cannot be served now.",
    "content": {"application/json": {"schema": {"$ref": REF.format(model="Error")}}, "text/plain": {"schema": {"type": "string"}}},
}


def install(app: FastAPI) -> None:
    """Serve the corrected document at /openapi.json."""
    plain = app.openapi
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _corrected(plain(), bodies["$defs"])
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _corrected(document: dict[str, Any], bodies: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in FASTAPI_SCHEMAS:
        schemas.pop(name, None)
    schemas.update(bodies, Error=ERROR)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses.update({"4XX": FAILURE, "5XX": FAILURE})
            if path in STREAMING_PATHS:
                responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return document
