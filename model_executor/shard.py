"""Which part of a model a rank holds: its layers, heads and rows of the vocabulary, hence the slices of a checkpoint that it reads.

Attention is split by groups of query heads that share a KV head. With at least as many KV heads as ranks a rank gets whole groups,
the first ranks one more where they do not divide evenly (9 query and 3 KV heads on 2 ranks: 6 and 2, 3 and 1). With fewer, a KV
head is held by several ranks, which share its query heads. The inner size of the MLP and the vocabulary are split as evenly as
whole units allow, the layers among the stages likewise.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from ..layers.rank_spec import SINGLE, RankSpec
from .model_config import ModelConfig

UNIT = 32  # inner sizes are split in multiples of it where they are large: blocks of quantised weights stay whole
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


class ShardError(ValueError):
    """A model that cannot be split as asked. One line."""


class Slice(NamedTuple):
    """The part [start, stop) of a dimension (0 or 1) of a tensor."""

    dim: int
    start: int
    stop: int


class Shard:
    """The part of one rank. ``local`` describes it as if it were a model of its own, but for the vocabulary."""

    def __init__(self, config: ModelConfig, spec: RankSpec = SINGLE) -> None:
        """Raises ShardError."""
        rank, size = spec.tp_rank, spec.tp_size
        heads = config.num_attention_heads
        if size > heads:
            raise ShardError(f"tp_size {size} is more than the model's {heads} attention heads")
        if spec.pp_size > config.num_hidden_layers:
            raise ShardError(f"pp_size {spec.pp_size} is more than the model's {config.num_hidden_layers} layers")
        self.spec = spec
        self.layers = share(config.num_hidden_layers, spec.pp_rank, spec.pp_size)
        self.kv_heads, self.q_heads = _heads(heads, config.num_key_value_heads, rank, size)
        self.inner = _share_in_units(config.intermediate_size, rank, size)
        self.vocab = share(config.vocab_size, rank, size)
        self.vocab_sizes = [len(share(config.vocab_size, other, size)) for other in range(size)]
        self._head_dim = config.head_dim
        self._tied = config.tie_word_embeddings
        self.local = config
        if spec.world_size > 1:
            self.local = msgspec.structs.replace(
                config,
                num_hidden_layers=len(self.layers),
                layer_types=config.layer_types[self.layers.start : self.layers.stop],
                num_attention_heads=len(self.q_heads),
                num_key_value_heads=len(self.kv_heads),
                intermediate_size=len(self.inner),
            )

    @property
    def is_whole(self) -> bool:
        return self.spec.world_size == 1

    @property
    def has_embedding(self) -> bool:
        """The first stage looks tokens up; the last uses the same table as its head where they are tied."""
        return self.spec.is_first_stage or (self.has_head and self._tied)

    @property
    def has_head(self) -> bool:
        return self.spec.is_last_stage

    def local_name(self, name: str) -> str | None:
        """What a parameter of the checkpoint is called here; None if this rank does not hold it."""
        match = _LAYER.fullmatch(name)
        if match is not None:
            head, layer, tail = match.groups()
            return f"{head}{int(layer) - self.layers.start}{tail}" if int(layer) in self.layers else None
        if name.startswith("lm_head.") or name.endswith(".norm.weight"):
            return name if self.has_head else None
        return name if self.has_embedding else None

    def slice_of(self, name: str) -> Slice | None:
        """The part of a parameter that is held here; None for all of it."""
        if self.spec.tp_size == 1:
            return None
        module, _, kind = name.rpartition(".")
        part = module.rpartition(".")[2]
        if part in ("o_proj", "down_proj"):  # their inputs are split, so is the second dimension; the bias is the first rank's
            if kind != "weight":
                return None
            units, size = (self.q_heads, self._head_dim) if part == "o_proj" else (self.inner, 1)
            return Slice(1, units.start * size, units.stop * size)
        rows = {
            "q_proj": (self.q_heads, self._head_dim),
            "k_proj": (self.kv_heads, self._head_dim),
            "v_proj": (self.kv_heads, self._head_dim),
            "gate_proj": (self.inner, 1),
            "up_proj": (self.inner, 1),
            "embed_tokens": (self.vocab, 1),
            "lm_head": (self.vocab, 1),
        }.get(part)
        return rows and Slice(0, rows[0].start * rows[1], rows[0].stop * rows[1])

    def is_summed_bias(self, name: str) -> bool:
        """A bias that is added to a sum over ranks: all but the first rank hold zeros."""
        return self.spec.tp_rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias"))

    def explain(self) -> str:
        """For people."""
        return (
            f"layers {self.layers.start}-{self.layers.stop - 1}, query heads {self.q_heads.start}-{self.q_heads.stop - 1}, "
            f"KV heads {self.kv_heads.start}-{self.kv_heads.stop - 1}"
        )


def share(total: int, rank: int, size: int) -> range:
    """The part of a rank when ``total`` units are dealt as evenly as whole units allow, the first ranks getting more."""
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def _share_in_units(total: int, rank: int, size: int) -> range:
    if total % UNIT or total // UNIT < size:
        return share(total, rank, size)
    units = share(total // UNIT, rank, size)
    return range(units.start * UNIT, units.stop * UNIT)


def _heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """(KV heads, query heads) of a rank."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv_heads = share(num_kv_heads, rank, size)
        return kv_heads, range(kv_heads.start * group, kv_heads.stop * group)
    holders = [share(size, head, num_kv_heads) for head in range(num_kv_heads)]
    head = next(head for head, ranks in enumerate(holders) if rank in ranks)
    if len(holders[0]) > group:
        raise ShardError(f"tp_size {size}: {len(holders[0])} ranks cannot share the {group} query heads of a KV head")
    queries = share(group, rank - holders[head].start, len(holders[head]))
    return range(head, head + 1), range(head * group + queries.start, head * group + queries.stop)
