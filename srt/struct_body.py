"""Bodies that are msgspec structs: checked by their types, and described in the OpenAPI document with every field and default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ..managers.errors import RequestError

S = TypeVar("S", bound=msgspec.Struct)


def parse_struct(kind: type[S], values: Mapping[str, Any]) -> S:
    """The body as a struct; a null means the default. Raises RequestError that names the field."""
    try:
        return msgspec.convert({name: value for name, value in values.items() if value is not None}, kind, strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=_field(str(error))) from None


def struct_parser(kind: type[S]) -> Callable[[Mapping[str, Any]], S]:
    """``parse_struct`` for ``parse_body``."""
    return lambda values: parse_struct(kind, values)


def body_of(*kinds: type[msgspec.Struct], required: bool = True) -> dict[str, Any]:
    """What a route says of its body: openapi_extra."""
    schemas = []
    for kind in kinds:
        (_,), components = msgspec.json.schema_components([kind], ref_template="#/{name}")
        schemas.append(_inlined(components[kind.__name__], components))
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _inlined(value: Any, components: Mapping[str, Any]) -> Any:
    """A schema without references: each is replaced by what it names."""
    if isinstance(value, list):
        return [_inlined(item, components) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(components[value["$ref"].rpartition("/")[2]], components)
    return {name: _inlined(item, components) for name, item in value.items()}


def _field(message: str) -> str | None:
    """The field that msgspec's message is about."""
    missing = message.partition("missing required field `")[2].partition("`")[0]
    path = message.partition("`$.")[2].split("`")[0].split("[")[0]
    return ".".join(part for part in (path, missing) if part) or None
