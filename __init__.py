"""Banyan: a serving engine for language models. Public names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .version import __version__

_LANGUAGE = (
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
)
_HOME = {
    "Engine": ".srt.engine",
    "ServerArgs": ".srt.server_args",
    "Runtime": ".lang.backend.runtime",
    "RuntimeEndpoint": ".lang.backend.runtime_endpoint",
    "OpenAI": ".lang.backend.openai",
    "Anthropic": ".lang.backend.anthropic",
    "RequestError": ".managers.errors",
    "StartError": ".managers.errors",
    "EngineDeadError": ".managers.errors",
    **dict.fromkeys(("BackendError", "LangError", "StepError", "UnsupportedError", "VariableError"), ".lang.errors"),
    **dict.fromkeys(_LANGUAGE, ".lang.api"),
}

__all__ = [
    "Anthropic",
    "BackendError",
    "Engine",
    "EngineDeadError",
    "LangError",
    "OpenAI",
    "RequestError",
    "Runtime",
    "RuntimeEndpoint",
    "ServerArgs",
    "StartError",
    "StepError",
    "UnsupportedError",
    "VariableError",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
