"""What the model is: one frozen description, read from a Hugging Face folder or from a GGUF file.

Whatever the source, its fields are first brought into the shape of a config.json; one parser then fills in what the family's own
defaults say, checks the numbers and normalises rope, so that the layers never look at a raw config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["ModelConfig", "ModelConfigError", "RopeScaling", "load_model_config", "parse_config"]

FULL = "full_attention"
SLIDING = "sliding_attention"


class ModelConfigError(ValueError):
    """A config that is missing, malformed or of an architecture that is not supported. The message is one line."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling of the rotary embedding. Parameters that a type does not use keep their defaults.

    linear and dynamic use ``factor``; llama3 also the two freq factors and ``original_max_position_embeddings``; yarn that length,
    the betas, ``truncate`` and, where given, ``attention_factor`` or the mscales.
    """

    type: str = "none"  # none | linear | dynamic | yarn | llama3
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # always set where the type is not none
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants of one decoder-only model."""

    architecture: str  # a key of the models' registry, such as LlamaForCausalLM
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # as the config says it; dynamic rope starts from it
    context_len: int  # longest sequence that is served
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling  # of full-attention layers; sliding layers with a rope_local_theta are never scaled
    rope_local_theta: float | None  # rope base of sliding layers, None: rope_theta everywhere
    tie_word_embeddings: bool
    hidden_act: str  # silu | gelu | gelu_pytorch_tanh
    attention_bias: bool  # of q, k and v
    attention_out_bias: bool  # of o
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim of q and k
    sliding_window: int | None  # a query sees this many positions, its own included; None: no layer slides
    layer_types: list[str]  # per layer: full_attention | sliding_attention
    query_pre_attn_scalar: float  # attention scale is its power of -1/2
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    eos_token_ids: list[int]  # config's, then generation_config's, without repeats
    bos_token_id: int | None
    torch_dtype: str  # bfloat16 | float16 | float32: what the weights were saved in
    quantization: str | None  # most used block type of a GGUF file, such as Q4_1; None: plain weights


class _Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's config.json may leave out."""

    model_types: tuple[str, ...]
    defaults: dict[str, Any]
    attention_bias: bool | None = None  # None: the config says
    attention_out_bias: bool | None = None  # None: as attention_bias
    qk_norm: bool = False


_SILU = {"hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0}
FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(model_types=("llama",), defaults=_SILU | {"max_position_embeddings": 2048}),
    "MistralForCausalLM": _Family(
        model_types=("mistral",),
        defaults=_SILU | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        attention_bias=False,
    ),
    "Qwen2ForCausalLM": _Family(
        model_types=("qwen2",),
        defaults=_SILU | {"max_position_embeddings": 32768, "sliding_window": 4096},
        attention_bias=True,
        attention_out_bias=False,
    ),
    "Qwen3ForCausalLM": _Family(
        model_types=("qwen3",),
        defaults=_SILU | {"max_position_embeddings": 32768, "head_dim": 128, "sliding_window": 4096},
        qk_norm=True,
    ),
    "Gemma3ForCausalLM": _Family(
        model_types=("gemma3_text", "gemma3"),
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10000.0,
            "max_position_embeddings": 131072,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        qk_norm=True,
    ),
}
_ALIASES = {"Gemma3TextModel": "Gemma3ForCausalLM", "Gemma3TextForCausalLM": "Gemma3ForCausalLM"}
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
_DTYPES = ("bfloat16", "float16", "float32")


class _Fields:
    """Typed access to a raw config with a family's defaults behind it; every error names the field and the source."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.raw, self.defaults, self.where = raw, defaults, where

    def error(self, message: str) -> ModelConfigError:
        return ModelConfigError(f"{self.where}: {message}")

    def get(self, key: str) -> Any:
        return self.raw[key] if key in self.raw else self.defaults.get(key)

    def num(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.error(f"{key} must be a positive number, not {value!r}")
        return float(value)

    def opt_num(self, key: str) -> float | None:
        return None if self.get(key) is None else self.num(key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.num(key, default)
        if value != int(value):
            raise self.error(f"{key} must be a whole number, not {value!r}")
        return int(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return bool(value)


def load_model_config(path: str, *, context_length: int | None = None, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the config of a model folder or of a .gguf file.

    ``overrides`` replace top-level keys of config.json (for GGUF: of the config.json it stands for) before anything is read.
    Raises ModelConfigError, or GGUFError for a damaged GGUF file.
    """
    if os.path.isfile(path):
        from .gguf_config import read_gguf_config

        raw, generation = read_gguf_config(path), {}
    else:
        raw = _read_json(Path(path, "config.json"), required=True)
        generation = _read_json(Path(path, "generation_config.json"), required=False)
    return parse_config(raw | dict(overrides or {}), generation, context_length=context_length, where=path)


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            raise ModelConfigError(f"{path} does not exist") from None
        return {}
    except (OSError, ValueError) as e:
        raise ModelConfigError(f"{path} cannot be read: {e}") from None
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} is not a JSON object")
    return value


def parse_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    context_length: int | None = None,
    where: str = "config.json",
) -> ModelConfig:
    """Turn the contents of a config.json (any transformers version) into a ModelConfig. Raises ModelConfigError."""
    architecture = _architecture(raw, where)
    family = FAMILIES[architecture]
    f = _Fields(raw, family.defaults, where)
    if raw.get("quantization_config"):
        raise f.error("pre-quantised checkpoints (quantization_config) are not supported")
    if f.flag("use_bidirectional_attention"):
        raise f.error("use_bidirectional_attention is not supported")
    heads, hidden = f.count("num_attention_heads"), f.count("hidden_size")
    kv_heads = f.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise f.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if f.get("head_dim") is None and hidden % heads:
        raise f.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = f.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise f.error(f"head_dim must be even, not {head_dim}")
    act = raw.get("hidden_activation") or f.get("hidden_act")
    if act not in _ACTIVATIONS:
        raise f.error(f"hidden_act {act!r} is not one of {', '.join(_ACTIVATIONS)}")
    theta, scaling, local_theta = _rope(f)
    window, layer_types = _layers(f, architecture)
    bias = f.flag("attention_bias") if family.attention_bias is None else family.attention_bias
    max_position = f.count("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        model_type=str(raw.get("model_type") or family.model_types[0]),
        hidden_size=hidden,
        intermediate_size=f.count("intermediate_size"),
        num_hidden_layers=f.count("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=f.count("vocab_size"),
        max_position_embeddings=max_position,
        context_len=_context_len(f, _own_context_len(architecture, max_position, scaling), context_length),
        rms_norm_eps=f.num("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_local_theta=local_theta,
        tie_word_embeddings=f.flag("tie_word_embeddings"),
        hidden_act=str(act),
        attention_bias=bias,
        attention_out_bias=bias if family.attention_out_bias is None else family.attention_out_bias,
        mlp_bias=f.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        sliding_window=window,
        layer_types=layer_types,
        query_pre_attn_scalar=f.num("query_pre_attn_scalar", head_dim),
        attn_logit_softcapping=f.opt_num("attn_logit_softcapping"),
        final_logit_softcapping=f.opt_num("final_logit_softcapping"),
        eos_token_ids=_token_ids(f, raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        bos_token_id=next(iter(_token_ids(f, raw.get("bos_token_id"))), None),
        torch_dtype=_dtype(f),
        quantization=raw.get("gguf_quantization"),
    )


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    by_type = {t: name for name, family in FAMILIES.items() for t in family.model_types if t != "gemma3"}
    named = raw.get("architectures") or []
    found = [_ALIASES.get(a, a) for a in named if isinstance(a, str)] if isinstance(named, list) else []
    if not found and raw.get("model_type") in by_type:
        found = [by_type[raw["model_type"]]]
    for name in found:
        if name in FAMILIES:
            return name
    what = ", ".join(found) or raw.get("model_type") or "(none named)"
    raise ModelConfigError(f"{where}: architecture {what} is not supported; supported are {', '.join(FAMILIES)}")


def _rope(f: _Fields) -> tuple[float, RopeScaling, float | None]:
    """(theta, scaling, local theta) from rope_parameters (flat, or one per layer type) or from the older keys."""
    params = f.get("rope_parameters")
    local_theta = f.opt_num("rope_local_base_freq")
    if isinstance(params, dict) and (FULL in params or SLIDING in params):
        local = params.get(SLIDING) or {}
        if _rope_type(local) != "none":
            raise f.error("scaled rope on sliding layers is not supported")
        local_theta = _Fields(local, {"rope_theta": local_theta}, f.where).opt_num("rope_theta")
        params = params.get(FULL)
    params = params or f.get("rope_scaling") or {}
    if not isinstance(params, dict):
        raise f.error(f"rope parameters must be an object, not {params!r}")
    r = _Fields(params, {"rope_theta": f.get("rope_theta")}, f.where)
    kind = _rope_type(params)
    if (r.get("partial_rotary_factor") or f.get("partial_rotary_factor") or 1.0) != 1.0:
        raise f.error("a partial_rotary_factor other than 1 is not supported")
    if kind == "none":
        return r.num("rope_theta"), RopeScaling(), local_theta
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        raise f.error(f"rope type {kind!r} is not one of default, linear, dynamic, yarn, llama3")
    scaling = RopeScaling(
        type=kind,
        factor=r.num("factor"),
        original_max_position_embeddings=r.count("original_max_position_embeddings", f.count("max_position_embeddings")),
        low_freq_factor=r.num("low_freq_factor", 1.0),
        high_freq_factor=r.num("high_freq_factor", 4.0),
        beta_fast=r.num("beta_fast", 32.0),
        beta_slow=r.num("beta_slow", 1.0),
        truncate=r.get("truncate") is not False,
        attention_factor=r.opt_num("attention_factor"),
        mscale=r.opt_num("mscale"),
        mscale_all_dim=r.opt_num("mscale_all_dim"),
    )
    return r.num("rope_theta"), scaling, local_theta


def _rope_type(params: Mapping[str, Any]) -> str:
    kind = str(params.get("rope_type") or params.get("type") or "default")
    return "none" if kind == "default" else kind


def _layers(f: _Fields, architecture: str) -> tuple[int | None, list[str]]:
    """The window and each layer's kind; without a window every layer is full."""
    n = f.count("num_hidden_layers")
    slides = architecture in ("MistralForCausalLM", "Gemma3ForCausalLM") or f.flag("use_sliding_window")
    window = f.count("sliding_window") if slides and f.get("sliding_window") is not None else None
    types = f.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != n or any(t not in (FULL, SLIDING) for t in types):
            raise f.error(f"layer_types must name {FULL} or {SLIDING} for each of the {n} layers")
    elif window is None or architecture == "MistralForCausalLM":
        types = [SLIDING if window else FULL] * n
    elif architecture == "Gemma3ForCausalLM":
        pattern = f.count("_sliding_window_pattern", f.count("sliding_window_pattern"))
        types = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(n)]
    else:
        first = f.count("max_window_layers", 28)
        types = [SLIDING if i >= first else FULL for i in range(n)]
    if window is None and SLIDING in types:
        raise f.error("layer_types name sliding layers, but there is no sliding_window")
    return (window if SLIDING in types else None), list(types)


def _own_context_len(architecture: str, max_position: int, scaling: RopeScaling) -> int:
    """llama3 (and all of Gemma 3) count the scaling in max_position_embeddings; the other types multiply it."""
    if scaling.type in ("none", "llama3") or architecture == "Gemma3ForCausalLM":
        return max_position
    base = scaling.original_max_position_embeddings if scaling.type == "yarn" else max_position
    return int(base * scaling.factor)


def _context_len(f: _Fields, own: int, wanted: int | None) -> int:
    if wanted is None:
        return own
    if wanted <= 0:
        raise f.error(f"context_length must be positive, not {wanted}")
    if wanted > own and os.environ.get("BANYAN_ALLOW_LONGER_CONTEXT") != "1":
        raise f.error(
            f"context_length {wanted} is above the model's {own}; set BANYAN_ALLOW_LONGER_CONTEXT=1 if it is known to work"
        )
    return wanted


def _token_ids(f: _Fields, *values: Any) -> list[int]:
    ids: list[int] = []
    for value in values:
        for i in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(i, bool) or not isinstance(i, int) or i < 0:
                raise f.error(f"token ids must be whole numbers, not {i!r}")
            ids.append(i)
    return list(dict.fromkeys(ids))


def _dtype(f: _Fields) -> str:
    name = str(f.get("dtype") or f.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise f.error(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return name
