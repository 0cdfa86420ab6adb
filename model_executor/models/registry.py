"""Models by the architecture that a config names."""

from __future__ import annotations

import importlib

from .blocks import DecoderModel

_MODULES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}


def model_class(architecture: str) -> type[DecoderModel]:
    """The class of an architecture, imported on first use. Raises ValueError for an unknown one."""
    if architecture not in _MODULES:
        raise ValueError(f"architecture {architecture} is not supported; supported are {', '.join(_MODULES)}")
    module = importlib.import_module(f".{_MODULES[architecture]}", __package__)
    found: type[DecoderModel] = getattr(module, architecture)
    return found
