"""From what a user calls a backend to a Backend."""

from __future__ import annotations

from typing import Any

from .base import Backend


def as_backend(given: Any) -> Backend:
    """A Backend itself, an Engine, something with an ``endpoint`` (a Runtime), or a server's URL. Raises TypeError for others."""
    if isinstance(given, Backend):
        return given
    if isinstance(given, str):
        from .runtime_endpoint import RuntimeEndpoint

        return RuntimeEndpoint(given)
    endpoint = getattr(given, "endpoint", None)
    if isinstance(endpoint, Backend):
        return endpoint
    if hasattr(given, "generate") and hasattr(given, "tokenizer_manager"):
        from .engine import EngineBackend

        return EngineBackend(given)
    raise TypeError(f"a backend is a RuntimeEndpoint, an Engine, OpenAI, Anthropic or a Runtime, not {type(given).__name__}")
