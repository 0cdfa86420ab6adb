"""ModelConfig from the configs that transformers writes, from older ones, and from GGUF metadata."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from banyan.model_executor.gguf_file import GGUFError
from banyan.model_executor.model_config import ModelConfigError, RopeScaling, load_model_config, parse_config

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 4096,
}
LLAMA: dict[str, Any] = SHAPE | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config_class", "architecture"),
    [
        ("LlamaConfig", "LlamaForCausalLM"),
        ("MistralConfig", "MistralForCausalLM"),
        ("Qwen2Config", "Qwen2ForCausalLM"),
        ("Qwen3Config", "Qwen3ForCausalLM"),
        ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    ],
)
def test_every_family_as_transformers_saves_it(tmp_path: Path, config_class: str, architecture: str) -> None:
    saved = getattr(transformers, config_class)(**SHAPE, dtype="bfloat16")
    saved.save_pretrained(tmp_path)
    config = load_model_config(str(tmp_path))
    assert config.architecture == architecture
    assert config.model_type == saved.model_type
    for key, value in SHAPE.items():
        assert getattr(config, key) == value
    assert config.context_len == 4096
    assert config.head_dim == getattr(saved, "head_dim", 32 // 4)
    assert config.rms_norm_eps == saved.rms_norm_eps
    assert config.tie_word_embeddings == saved.tie_word_embeddings
    assert config.hidden_act == getattr(saved, "hidden_activation", None) or saved.hidden_act
    assert config.sliding_window == saved.sliding_window if hasattr(saved, "sliding_window") else config.sliding_window is None
    assert config.layer_types == (getattr(saved, "layer_types", None) or [SLIDING if config.sliding_window else FULL] * 7)
    assert config.torch_dtype == "bfloat16"
    assert config.bos_token_id == saved.bos_token_id
    assert config.eos_token_ids == ([saved.eos_token_id] if saved.eos_token_id is not None else [])
    rope = saved.rope_parameters
    assert config.rope_theta == rope.get(FULL, rope)["rope_theta"]
    assert config.rope_local_theta == (rope[SLIDING]["rope_theta"] if SLIDING in rope else None)
    assert config.rope_scaling == RopeScaling()
    assert config.qk_norm == (architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"))
    assert (config.attention_bias, config.attention_out_bias) == (architecture == "Qwen2ForCausalLM", False)
    assert config.query_pre_attn_scalar == getattr(saved, "query_pre_attn_scalar", config.head_dim)


def test_gemma3_layers_and_ropes() -> None:
    config = parse_config(SHAPE | {"model_type": "gemma3_text", "sliding_window": 16, "head_dim": 8, "query_pre_attn_scalar": 168})
    assert config.layer_types == [SLIDING] * 5 + [FULL, SLIDING]
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 1e4)
    assert (config.hidden_act, config.tie_word_embeddings, config.query_pre_attn_scalar) == ("gelu_pytorch_tanh", True, 168)
    old = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_local_base_freq": 5000.0, "sliding_window_pattern": 2}
    config = parse_config(SHAPE | {"architectures": ["Gemma3TextModel"], "sliding_window": 16} | old)
    assert (config.rope_scaling.type, config.rope_scaling.factor, config.rope_local_theta) == ("linear", 8.0, 5000.0)
    assert config.layer_types == [SLIDING, FULL] * 3 + [SLIDING]
    assert config.context_len == 4096  # Gemma's own length has the factor in it


def test_qwen_slides_only_when_told() -> None:
    qwen = SHAPE | {"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 5}
    assert parse_config(qwen | {"use_sliding_window": False}).layer_types == [FULL] * 7
    config = parse_config(qwen | {"use_sliding_window": True})
    assert (config.layer_types, config.sliding_window) == ([FULL] * 5 + [SLIDING] * 2, 16)


def test_mistral_without_a_window() -> None:
    config = parse_config(SHAPE | {"model_type": "mistral", "sliding_window": None})
    assert (config.sliding_window, config.layer_types) == (None, [FULL] * 7)


@pytest.mark.parametrize("new", [True, False], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("scaling", "expected", "context_len"),
    [
        ({"type": "linear", "factor": 2.0}, RopeScaling(type="linear", factor=2.0, original_max_position_embeddings=4096), 8192),
        (
            {"rope_type": "dynamic", "factor": 4.0},
            RopeScaling(type="dynamic", factor=4.0, original_max_position_embeddings=4096),
            16384,
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 16,
                "attention_factor": 0.9,
            },
            RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=16.0, attention_factor=0.9),
            4096,
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            RopeScaling(type="llama3", factor=32.0, original_max_position_embeddings=512),
            4096,
        ),
    ],
    ids=["linear", "dynamic", "yarn", "llama3"],
)
def test_rope_scaling(scaling: dict[str, Any], expected: RopeScaling, context_len: int, new: bool) -> None:
    keys = {"rope_parameters": scaling | {"rope_theta": 5e5}} if new else {"rope_scaling": scaling, "rope_theta": 5e5}
    config = parse_config(LLAMA | keys)
    assert (config.rope_theta, config.rope_scaling, config.context_len) == (5e5, expected, context_len)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, Mistral"),
        ({"architectures": None, "model_type": "bert"}, "architecture bert is not supported"),
        ({"architectures": None}, "none named"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a positive number, not 'many'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive number"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not one of silu"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope type 'longrope' is not one of"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "rope parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": [FULL]}, "layer_types must name"),
        ({"layer_types": [SLIDING] * 7}, "there is no sliding_window"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"eos_token_id": "</s>"}, "token ids must be whole numbers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_bad_fields_are_named(change: dict[str, Any], message: str) -> None:
    raw = {k: v for k, v in (LLAMA | change).items() if v is not None}
    with pytest.raises(ModelConfigError, match=message) as caught:
        parse_config(raw, where="/models/x")
    assert str(caught.value).startswith("/models/x: ")
    assert "\n" not in str(caught.value)


def save(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def test_eos_of_both_files(tmp_path: Path) -> None:
    path = save(tmp_path, LLAMA | {"eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": [7, 2, 9]})
    config = load_model_config(path)
    assert (config.eos_token_ids, config.bos_token_id) == ([2, 7, 9], 1)


def test_overrides_replace_keys(tmp_path: Path) -> None:
    config = load_model_config(save(tmp_path, LLAMA), overrides={"num_hidden_layers": 2, "dtype": "float16"})
    assert (config.num_hidden_layers, config.layer_types, config.torch_dtype) == (2, [FULL] * 2, "float16")


def test_context_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, LLAMA)
    assert load_model_config(path, context_length=100).context_len == 100
    with pytest.raises(ModelConfigError, match="context_length 4097 is above the model's 4096"):
        load_model_config(path, context_length=4097)
    with pytest.raises(ModelConfigError, match="must be positive"):
        load_model_config(path, context_length=0)
    monkeypatch.setenv("BANYAN_ALLOW_LONGER_CONTEXT", "1")
    config = load_model_config(path, context_length=4097)
    assert (config.context_len, config.max_position_embeddings) == (4097, 4096)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist"):
        load_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json cannot be read"):
        load_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="not a JSON object"):
        load_model_config(str(tmp_path))


def gguf_model(folder: Path, arch: str, *, tensors: dict[str, Any] | None = None, **meta: Any) -> str:
    """A GGUF with the metadata that llama.cpp's converter writes for SHAPE, and an embedding."""
    path = folder / f"{arch}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(7)
    writer.add_context_length(4096)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in meta.items():
        getattr(writer, key)(*value) if isinstance(value, tuple) else getattr(writer, key)(value)
    for name, value in ({"token_embd.weight": np.zeros((99, 32))} | (tensors or {})).items():
        writer.add_tensor(name, np.asarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize(("arch", "family"), [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("gemma3", "Gemma3")])
def test_gguf_of_every_family(tmp_path: Path, arch: str, family: str) -> None:
    path = gguf_model(tmp_path, arch, add_rope_freq_base=1e5, add_eos_token_id=5, add_bos_token_id=3, add_sliding_window=16)
    config = load_model_config(path)
    assert config.architecture == f"{family}ForCausalLM"
    for key, value in SHAPE.items():
        assert getattr(config, key) == value
    assert (config.head_dim, config.rms_norm_eps, config.rope_theta) == (8, 1e-5, 1e5)
    assert (config.eos_token_ids, config.bos_token_id) == ([5], 3)
    assert (config.torch_dtype, config.quantization, config.tie_word_embeddings) == ("float32", None, True)
    assert config.sliding_window == (16 if arch == "gemma3" else None)
    assert config.rope_local_theta == (1e4 if arch == "gemma3" else None)
    assert config.layer_types[5:] == ([FULL, SLIDING] if arch == "gemma3" else [FULL, FULL])


def test_gguf_reads_what_only_the_tensors_tell(tmp_path: Path) -> None:
    bias = {"output.weight": np.zeros((99, 32)), "blk.0.attn_q.bias": np.zeros(32)}
    config = load_model_config(gguf_model(tmp_path, "llama", tensors=bias))
    assert (config.tie_word_embeddings, config.attention_bias) == (False, True)


def test_gguf_chat_model_stops_at_its_end_of_turn(tmp_path: Path) -> None:
    tokens = {
        "add_token_list": ["a", "<|im_end|>", "<end_of_turn>", "</s>"],
        "add_token_types": [1, 3, 1, 3],
        "add_eos_token_id": 3,
    }
    assert load_model_config(gguf_model(tmp_path, "llama", **tokens)).eos_token_ids == [3]
    assert load_model_config(gguf_model(tmp_path, "llama", add_chat_template="x", **tokens)).eos_token_ids == [3, 1]


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    yarn = {"add_rope_scaling_type": gguf.RopeScalingType.YARN, "add_rope_scaling_factor": 4.0}
    path = gguf_model(tmp_path, "qwen2", add_rope_scaling_orig_ctx_len=1024, **yarn)
    assert load_model_config(path).rope_scaling == RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=1024)


def test_gguf_llama3_rope_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    theta, factor = 5e5, 32.0
    divisors = []  # the definition, one frequency after the other
    for i in range(4):
        wavelen = 2 * math.pi * theta ** (2 * i / 8)
        smooth = (8192 / wavelen - 1) / 3
        divisors.append(1.0 if wavelen < 8192 / 4 else factor if wavelen > 8192 else 1 / ((1 - smooth) / factor + smooth))
    assert 1.0 < divisors[2] < factor
    config = load_model_config(gguf_model(tmp_path, "llama", tensors={"rope_freqs.weight": divisors}, add_rope_freq_base=theta))
    assert config.rope_scaling == RopeScaling(type="llama3", factor=factor, original_max_position_embeddings=8192)
    with pytest.raises(GGUFError, match="not those of Llama 3"):
        load_model_config(gguf_model(tmp_path, "llama", tensors={"rope_freqs.weight": [1, 2, 3, 4]}, add_rope_freq_base=theta))


@pytest.mark.parametrize(
    ("arch", "meta", "message"),
    [
        ("phi3", {}, "GGUF architecture 'phi3' is not supported; supported are llama, qwen2, qwen3, gemma3"),
        ("llama", {"add_expert_count": 8}, "mixture-of-experts"),
        ("llama", {"add_head_count_kv": [2, 2, 1, 2, 2, 2, 2]}, "head_count_kv differs between layers"),
        ("llama", {"add_value_length": 4}, "different head sizes"),
    ],
)
def test_gguf_that_is_not_supported(tmp_path: Path, arch: str, meta: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        load_model_config(gguf_model(tmp_path, arch, **meta))
