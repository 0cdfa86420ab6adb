"""How deeply the objects and arrays of a decoded body are nested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import RequestError

MAX_DEPTH = 100  # of objects and arrays within each other


def check_depth(name: str, value: Any) -> None:
    """Raises RequestError for a value that code which walks it recursively could not bear."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return
    raise RequestError(f"{name}: nested more than {MAX_DEPTH} levels deep.", param=name)


def _children(value: Any) -> Iterable[Any]:
    """Objects and arrays inside."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (child for child in inside if isinstance(child, dict | list))
