"""What the engine tells of itself: the bodies of /model_info and /server_info, and of Engine's methods of the same names."""

from __future__ import annotations

from typing import Any

import msgspec

from ..managers.tokenizer_manager import TokenizerManager
from ..version import __version__
from .server_args import ServerArgs

SECRET_WORDS = ("key", "password", "secret", "token")  # endings of options that are never shown


def shown(name: str, value: Any) -> Any:
    """An option's value as it may be printed."""
    return "(hidden)" if name.endswith(SECRET_WORDS) and value is not None else value


def model_info(tm: TokenizerManager) -> dict[str, Any]:
    """The model that is served."""
    config, model = tm.config, tm.info.model
    return {
        "model_path": config.model_path,
        "served_model_name": config.served_model_name,
        "tokenizer_path": config.tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": msgspec.json.decode(config.preferred_sampling_params) or None,
        "weight_version": config.weight_version,
        "load_format": model.load_format,
        "reasoning_parser": config.reasoning_parser,
        "tool_call_parser": config.tool_call_parser,
        "has_image_understanding": False,
        "has_continuations": True,
        "has_audio_understanding": False,
        "model_type": model.model_type,
        "architectures": model.architectures,
        "max_context_length": model.context_len,
        "vocab_size": model.vocab_size,
    }


async def server_info(tm: TokenizerManager, args: ServerArgs, *, status: str, startup_time: float | None) -> dict[str, Any]:
    """Every option with its value, what was derived, and the scheduler's state, which is asked for. Never a secret."""
    internal = await tm.internal_state()
    options = msgspec.to_builtins(args)
    return {
        **{name: value for name, value in options.items() if not name.endswith(SECRET_WORDS)},
        "served_model_name": tm.config.served_model_name,
        "tp_size": 1,
        "dp_size": 1,
        "status": status,
        "max_total_num_tokens": tm.info.max_total_num_tokens,
        "max_req_input_len": tm.info.max_req_input_len,
        "startup_time": startup_time,
        "scheduler_info": msgspec.to_builtins(tm.info),
        "internal_states": [internal],
        "version": __version__,
    }
