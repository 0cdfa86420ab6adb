"""GGUF metadata in the words of a config.json.

Keys are llama.cpp's. What a GGUF file leaves out is known of the family (Gemma 3: every sixth layer is global, sliding layers use
a rope base of 10000) or is read off the tensors (vocabulary size, biases, tied embeddings, llama3 rope factors).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from .gguf_file import GGUFFile
from .gguf_quants import Floats, GGUFError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's files say llama too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# Texts that end an assistant's turn; llama.cpp stops at them as well, whatever eos_token_id says.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
CONTROL = 3  # token_type of a control token
GEMMA3_27B_LAYERS = 62


def read_gguf_config(path: str) -> dict[str, Any]:
    """The config.json that a GGUF file stands for, plus ``gguf_quantization``. Raises GGUFError."""
    gguf = GGUFFile(path)
    try:
        return gguf_config(gguf)
    except GGUFError as e:
        raise GGUFError(f"{path}: {e}") from None


def gguf_config(gguf: GGUFFile) -> dict[str, Any]:
    """As read_gguf_config, for an open file."""
    arch = gguf.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise GGUFError(f"GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if gguf.metadata.get(f"{arch}.expert_count"):
        raise GGUFError("mixture-of-experts models are not supported")
    if gguf.metadata.get("split.count", 1) > 1:
        raise GGUFError("a GGUF split over several files is not supported; join them with llama-gguf-split --merge")
    if "token_embd.weight" not in gguf.tensors:
        raise GGUFError("there is no token_embd.weight; it does not hold a whole model")
    keys = {k.removeprefix(f"{arch}."): v for k, v in gguf.metadata.items() if k.startswith(f"{arch}.")}
    heads = _uniform(keys, "attention.head_count")
    head_dim = keys.get("attention.key_length") or keys.get("rope.dimension_count") or _head_dim(keys, heads)
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise GGUFError("keys and values of different head sizes are not supported")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": "gemma3_text" if arch == "gemma3" else arch,
        "hidden_size": keys.get("embedding_length"),
        "intermediate_size": _uniform(keys, "feed_forward_length"),
        "num_hidden_layers": keys.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(keys, "attention.head_count_kv"),
        "head_dim": head_dim,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": keys.get("context_length"),
        "rms_norm_eps": _short(keys.get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(gguf, keys, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(gguf),
        "dtype": _dtype(gguf),
        "gguf_quantization": _quantization(gguf),
    }
    return config | (_gemma3(keys, heads, head_dim, config["rope_parameters"]) if arch == "gemma3" else {})


def _uniform(keys: dict[str, Any], key: str) -> Any:
    """A value that llama.cpp may write per layer; models whose layers differ are refused."""
    value = keys.get(key)
    if isinstance(value, np.ndarray):
        if len(value) == 0 or (value != value[0]).any():
            raise GGUFError(f"{key} differs between layers, which is not supported")
        return value[0].item()
    return value


def _head_dim(keys: dict[str, Any], heads: Any) -> int | None:
    hidden = keys.get("embedding_length")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _short(value: Any) -> Any:
    """The shortest decimal that is the same float32: 1e-05 instead of 9.999999747e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(gguf: GGUFFile, keys: dict[str, Any], head_dim: Any) -> dict[str, Any]:
    theta = _short(keys.get("rope.freq_base", 10000.0))
    params: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    if kind == "none" and "rope.scale_linear" in keys:
        kind = "linear"
    if kind != "none" and factor not in (None, 0.0, 1.0):
        params |= {"rope_type": kind, "factor": _short(factor)}
        original = keys.get("rope.scaling.original_context_length")
        params |= {"original_max_position_embeddings": original} if original else {}
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if f"rope.scaling.{theirs}" in keys:
                params[ours] = _short(keys[f"rope.scaling.{theirs}"])
    if "rope_freqs.weight" in gguf.tensors:
        params |= _llama3(gguf.tensor("rope_freqs.weight"), theta, head_dim)
    if keys.get("rope.dimension_count", head_dim) != head_dim:
        params["partial_rotary_factor"] = keys["rope.dimension_count"] / head_dim
    return params


def _llama3(factors: Floats, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3 rope, from the divisor of each frequency: the file holds those and not what they were computed from.

    All published models use 1, 4 and 8192; the divisors that these give are held against the file's.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    wavelens = 2 * math.pi * np.power(theta, np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelens - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if len(factors) != len(expected) or not np.allclose(factors, expected, rtol=1e-3):
        raise GGUFError("the rope frequencies (rope_freqs.weight) are not those of Llama 3, which is not supported")
    return {
        "rope_type": "llama3",
        "factor": _short(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _gemma3(keys: dict[str, Any], heads: Any, head_dim: Any, rope: dict[str, Any]) -> dict[str, Any]:
    pattern = keys.get("attention.sliding_window_pattern", 6)
    by_layer: dict[str, Any] = {"sliding_window_pattern": pattern}
    if isinstance(pattern, np.ndarray):
        by_layer = {"layer_types": ["sliding_attention" if p else "full_attention" for p in pattern.tolist()]}
    scalar = _head_dim(keys, heads) if keys.get("block_count") == GEMMA3_27B_LAYERS else head_dim
    rope_theta = rope["rope_theta"] if "rope.freq_base" in keys else 1_000_000.0
    return by_layer | {
        "sliding_window": keys.get("attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": rope_theta},
            "sliding_attention": {"rope_theta": _short(keys.get("rope.freq_base_swa", 10000.0)), "rope_type": "default"},
        },
    }


def _eos(gguf: GGUFFile) -> list[int]:
    """eos, eot and eom; of a chat model also the control tokens that are known to end a turn."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [gguf.metadata[k] for n in names if (k := f"tokenizer.ggml.{n}") in gguf.metadata]
    types = gguf.metadata.get("tokenizer.ggml.token_type")
    if "tokenizer.chat_template" in gguf.metadata and isinstance(types, np.ndarray):
        tokens = gguf.metadata.get("tokenizer.ggml.tokens", [])
        ids += [i for i in np.flatnonzero(types == CONTROL).tolist() if i < len(tokens) and tokens[i] in END_OF_TURN]
    return list(dict.fromkeys(ids))


def _quantization(gguf: GGUFFile) -> str | None:
    plain = ("F32", "F16", "BF16")
    weights = Counter(t.type for t in gguf.tensors.values() if t.type not in plain)
    return weights.most_common(1)[0][0] if weights else None


def _dtype(gguf: GGUFFile) -> str:
    """Of plain weights their own; of quantised ones bfloat16, whose range holds every family's activations."""
    types = {t.type for t in gguf.tensors.values()}
    if types == {"F32"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"
