"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, which the config's attention_bias says."""

from __future__ import annotations

from .blocks import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """The shared decoder as it is."""
