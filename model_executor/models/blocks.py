"""Decoder blocks that the families share. What differs between families is data: fields of ModelConfig, and the two classes that a
family names, its layer and its norm.

Legend: T tokens, H query heads, K KV heads, D head dim, S requests that sample, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import torch
from torch import nn

from ...layers.activation import gated_activation
from ...layers.attention.attention import Attention
from ...layers.attention.base import AttentionSpec
from ...layers.embedding import Embedding, VocabParallelEmbedding
from ...layers.forward_batch import ForwardBatch
from ...layers.hidden import lay_embeds
from ...layers.kernels.ops import current_ops
from ...layers.linear import Linear, MergedLinear
from ...layers.logits import compute_logits
from ...layers.norm import RMSNorm
from ...layers.parallel import ONE, Ranks
from ...layers.rotary import RopeTables, RotaryEmbedding
from ..model_config import SLIDING, ModelConfig
from ..shard import Shard

LoadMap = dict[str, tuple[str, int]]  # checkpoint's module -> (merged module, part of it)

MERGED_PROJECTIONS: LoadMap = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class SelfAttention(nn.Module):
    """Projections, optional norm of q and k, rotation, attention over the pool, output projection."""

    def __init__(self, config: ModelConfig, layer_id: int, norm: type[RMSNorm], dtype: torch.dtype) -> None:
        super().__init__()
        self.group = ONE  # the ranks over which the output is summed
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = MergedLinear(config.hidden_size, (q_size, kv_size, kv_size), bias=config.attention_bias, dtype=dtype)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_out_bias, dtype=dtype)
        self.q_norm = norm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = norm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.rotate = current_ops().rotate
        self.attention = Attention(
            AttentionSpec(
                layer_id=layer_id,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=config.query_pre_attn_scalar**-0.5,
                sliding_window=config.sliding_window if config.layer_types[layer_id] == SLIDING else None,
                soft_cap=config.attn_logit_softcapping,
            )
        )

    def forward(self, x: torch.Tensor, rope: RopeTables, batch: ForwardBatch) -> torch.Tensor:
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        split = self.num_heads + self.num_kv_heads
        if self.q_norm is not None and self.k_norm is not None:
            q = self.rotate(self.q_norm(qkv[:, : self.num_heads]), rope)
            k = self.rotate(self.k_norm(qkv[:, self.num_heads : split]), rope)
        else:
            qk = self.rotate(qkv[:, :split], rope)
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        out: torch.Tensor = self.o_proj(self.attention(q, k, qkv[:, split:], batch))
        return self.group.all_reduce(out)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = ONE  # the ranks over which the output is summed
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedLinear(hidden, (inner, inner), bias=config.mlp_bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias, dtype=dtype)
        self.act = gated_activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_up_proj(x)))
        return self.group.all_reduce(out)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer_id: int, norm: type[RMSNorm], dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer_id, norm, dtype)
        self.mlp = GatedMLP(config, dtype)
        self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.post_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def forward(self, x: torch.Tensor, rope: RopeTables, batch: ForwardBatch) -> torch.Tensor:
        normed, x = self.post_attention_layernorm.add(x, self.self_attn(self.input_layernorm(x), rope, batch))
        mlp: torch.Tensor = self.mlp(normed)
        return x + mlp


class DecoderModel(nn.Module):
    """Embedding, layers, final norm, head. A family is a subclass that names its layer, its norm and its load map.

    Parameters are created on torch's default device, uninitialised.
    """

    LAYER: ClassVar[type[DecoderLayer]] = DecoderLayer
    NORM: ClassVar[type[RMSNorm]] = RMSNorm
    LOAD_MAP: ClassVar[LoadMap] = MERGED_PROJECTIONS
    PREFIX: ClassVar[str] = "model."  # of a checkpoint's names, the head's apart

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, shard: Shard | None = None, ranks: Ranks | None = None) -> None:
        """config: of the whole model. shard: the part that is built; ranks: who holds the rest."""
        super().__init__()
        shard, ranks = shard or Shard(config), ranks or Ranks()
        local, hidden, size = shard.local, config.hidden_size, len(shard.vocab)
        self.soft_cap = config.final_logit_softcapping
        self.group, self.vocab_sizes = ranks.tp, shard.vocab_sizes
        self.embed_tokens = _embedding(config, dtype, shard, ranks, self.embed_scale(config)) if shard.has_embedding else None
        self.layers = nn.ModuleList(self.LAYER(local, i, self.NORM, dtype) for i in range(local.num_hidden_layers))
        self.norm = self.NORM(hidden, eps=config.rms_norm_eps, dtype=dtype) if shard.has_head else None
        has_own_head = shard.has_head and not config.tie_word_embeddings
        self.lm_head = Linear(hidden, size, bias=False, dtype=dtype) if has_own_head else None
        self.rope = full_rope(config, dtype)
        self.local_rope = None if config.rope_local_theta is None else local_rope(config, config.rope_local_theta, dtype)
        self.layer_is_local = [self.local_rope is not None and kind == SLIDING for kind in local.layer_types]
        for module in self.modules():
            if isinstance(module, SelfAttention | GatedMLP):
                module.group = ranks.tp

    @staticmethod
    def embed_scale(config: ModelConfig) -> float | None:
        """What embeddings are multiplied by."""
        return None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the rows that sample, float32 [S, V]: only the last token of each meets the head."""
        return self.logits(self.hidden_states(batch).index_select(0, batch.sample_tokens))

    def hidden_states(self, batch: ForwardBatch, x: torch.Tensor | None = None) -> torch.Tensor:
        """What the head takes, or the next stage, of every token of the step: [T, hidden]. x: what the stage before yields."""
        if x is None:
            x = lay_embeds(self.embed(batch.input_ids), batch.embeds)
        rope = self.rope(batch.positions)
        local = rope if self.local_rope is None else self.local_rope(batch.positions)
        for layer, is_local in zip(self.layers, self.layer_is_local, strict=True):
            x = layer(x, local if is_local else rope, batch)
        if self.norm is None:
            return x
        normed: torch.Tensor = self.norm(x)
        return normed

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden]. Only in the first stage."""
        if self.embed_tokens is None:
            raise RuntimeError("this stage has no embedding")
        x: torch.Tensor = self.embed_tokens(input_ids)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [N, V] of hidden states [N, hidden]. Only in the last stage."""
        head = self.head
        if head is None:
            raise RuntimeError("this stage has no head")
        return self.group.gather_columns(compute_logits(hidden, head.project, soft_cap=self.soft_cap), self.vocab_sizes)

    @property
    def head(self) -> Linear | Embedding | None:
        """What projects to logits: the embedding where it is tied; None in a stage without a head."""
        return self.embed_tokens if self.lm_head is None and self.norm is not None else self.lm_head


def _embedding(config: ModelConfig, dtype: torch.dtype, shard: Shard, ranks: Ranks, scale: float | None) -> Embedding:
    if ranks.tp.size == 1:
        return Embedding(config.vocab_size, config.hidden_size, dtype=dtype, scale=scale)
    return VocabParallelEmbedding(shard.vocab, config.hidden_size, group=ranks.tp, dtype=dtype, scale=scale)


def full_rope(config: ModelConfig, dtype: torch.dtype) -> RotaryEmbedding:
    """Rope of full-attention layers, and of sliding ones without a base of their own."""
    params = msgspec.structs.asdict(config.rope_scaling) | {"max_position_embeddings": config.max_position_embeddings}
    kind = config.rope_scaling.type
    return RotaryEmbedding(config.head_dim, config.context_len, config.rope_theta, kind=kind, params=params, dtype=dtype)


def local_rope(config: ModelConfig, theta: float, dtype: torch.dtype) -> RotaryEmbedding:
    """Rope of sliding layers, never scaled."""
    return RotaryEmbedding(config.head_dim, config.context_len, theta, kind="none", params={}, dtype=dtype)
