"""Qwen3: Llama with a norm over each head of q and k, which the config's qk_norm says."""

from __future__ import annotations

from .blocks import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """The shared decoder as it is."""
