"""Llama 2 and 3, SmolLM2, and Mistral, whose layers slide where its config has a window."""

from __future__ import annotations

from .blocks import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """The shared decoder as it is; biases, window and rope come from the config."""


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window in every layer."""
