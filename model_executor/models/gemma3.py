"""Gemma 3, text only: norms around both blocks, scaled embeddings, local layers with a rope of their own."""

from __future__ import annotations

import torch

from ...layers.forward_batch import ForwardBatch
from ...layers.norm import GemmaRMSNorm, RMSNorm
from ...layers.rotary import RopeTables
from ..model_config import ModelConfig
from .blocks import DecoderLayer, DecoderModel


class Gemma3DecoderLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layer_id: int, norm: type[RMSNorm], dtype: torch.dtype) -> None:
        super().__init__(config, layer_id, norm, dtype)
        self.pre_feedforward_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.post_feedforward_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def forward(self, x: torch.Tensor, rope: RopeTables, batch: ForwardBatch) -> torch.Tensor:
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, batch))
        normed, x = self.pre_feedforward_layernorm.add(x, attended)
        mlp: torch.Tensor = self.post_feedforward_layernorm(self.mlp(normed))
        return x + mlp


class Gemma3ForCausalLM(DecoderModel):
    """The shared decoder with Gemma's layer, norm and embedding scale."""

    LAYER = Gemma3DecoderLayer
    NORM = GemmaRMSNorm

    @staticmethod
    def embed_scale(config: ModelConfig) -> float:
        return float(config.hidden_size**0.5)
