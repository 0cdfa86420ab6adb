"""Banyan: a serving engine for language models. Public names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .version import __version__

_HOME = {
    "Engine": ".srt.engine",
    "RequestError": ".managers.errors",
    "StartError": ".managers.errors",
    "EngineDeadError": ".managers.errors",
}

__all__ = ["Engine", "EngineDeadError", "RequestError", "StartError", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
