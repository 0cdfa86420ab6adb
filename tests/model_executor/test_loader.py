"""Weights come out under the checkpoint's names and in its layout, whatever file they lie in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from banyan.model_executor.gguf_file import GGUFError
from banyan.model_executor.loader import WeightsError, iter_weights, shape_error
from banyan.model_executor.model_config import ModelConfig, load_model_config, parse_config
from banyan.srt.model_source import resolve_model

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CONFIG = parse_config(SHAPE | {"model_type": "llama"})
# llama.cpp's names of what a decoder layer of each family holds
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}


def tiny_model(arch: str, **changes: Any) -> transformers.PreTrainedModel:
    family = FAMILIES[arch]
    config_class = getattr(transformers, "Gemma3TextConfig" if arch == "gemma3" else f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**SHAPE | changes))
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # which are all ones or zeros
            parameter.data.uniform_(-1, 1)
    return model


def expected_weights(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: tied embeddings once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k: row i of a head's first half, then row i of its second half."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def to_gguf(model: transformers.PreTrainedModel, arch: str, path: Path) -> str:
    """What llama.cpp's converter makes of a model."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_key_length(SHAPE["head_dim"])
    writer.add_value_length(SHAPE["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    layer_names = GEMMA_LAYER if arch == "gemma3" else LAYER
    for name, tensor in expected_weights(model).items():
        data = tensor.numpy().copy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = interleave(data, SHAPE["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        if arch == "gemma3" and name.endswith("norm.weight"):
            data += 1
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{layer_names[part]}"
        else:
            target = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem]
        writer.add_tensor(f"{target}.{kind}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def read(path: Path | str, config: ModelConfig = CONFIG, load_format: str = "auto") -> dict[str, torch.Tensor]:
    pairs = list(iter_weights(str(path), load_format, config))
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", list(FAMILIES))
def test_gguf_gives_the_checkpoint_back(tmp_path: Path, arch: str, tied: bool) -> None:
    changes = {"attention_bias": True, "mlp_bias": True} if arch == "llama" else {}
    model = tiny_model(arch, tie_word_embeddings=tied, **changes)
    path = to_gguf(model, arch, tmp_path / "m.gguf")
    config = load_model_config(path)
    assert config.tie_word_embeddings is tied
    assert_same(read(path, config), expected_weights(model), atol=1e-6 if arch == "gemma3" else 0.0)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_safetensors_as_transformers_saves_them(tmp_path: Path, shard: str) -> None:
    model = tiny_model("qwen3")
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shard == "20KB")
    assert_same(read(tmp_path, load_model_config(str(tmp_path))), expected_weights(model))


def test_any_safetensors_do(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3, dtype=torch.float16)}, tmp_path / "two.safetensors")
    got = read(tmp_path)
    assert {name: (t.dtype, list(t.shape)) for name, t in got.items()} == {
        "a": (torch.float32, [2]),
        "b": (torch.float16, [3]),
    }


def test_model_safetensors_wins_over_others(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "adapter.safetensors")
    assert_same(read(tmp_path), {"a": torch.ones(2)})


def test_tied_heads_and_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    names = ["model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    assert set(read(tmp_path)) == {"model.norm.weight", "lm_head.weight"}
    tied = parse_config(SHAPE | {"model_type": "llama", "tie_word_embeddings": True})
    assert set(read(tmp_path, tied)) == {"model.norm.weight"}


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_broken_indices(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(WeightsError, match=r"1 weights named in .* b is the first"):
        read(tmp_path)
    for file in ("y.safetensors", "../x.safetensors", "/x.safetensors"):
        index(tmp_path, {"a": file})
        with pytest.raises(WeightsError, match="which is not in its folder"):
            read(tmp_path)
    index(tmp_path, None)
    with pytest.raises(WeightsError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b"\xff" * 8 + b[8:], lambda b: b""])
def test_damaged_safetensors(tmp_path: Path, damage: Any) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(200)}, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_formats_that_do_not_fit(tmp_path: Path) -> None:
    path = to_gguf(tiny_model("llama"), "llama", tmp_path / "m.gguf")
    with pytest.raises(WeightsError, match=r"holds no \.safetensors files"):
        read(tmp_path)
    with pytest.raises(WeightsError, match="in the format safetensors"):
        read(path, load_format="safetensors")
    with pytest.raises(WeightsError, match="in the format gguf"):
        read(tmp_path, load_format="gguf")
    with pytest.raises(WeightsError, match="load format 'pt' reads no weights"):
        read(path, load_format="pt")


def test_unknown_and_truncated_gguf(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    path = to_gguf(model, "qwen3", tmp_path / "m.gguf")
    assert read(path, load_format="gguf")
    Path(path).write_bytes(Path(path).read_bytes()[:-100])
    with pytest.raises(GGUFError, match="truncated"):
        read(path)
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_tensor("blk.0.ssm_conv1d.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"blk\.0\.ssm_conv1d\.weight is not known for architecture llama"):
        read(tmp_path / "odd.gguf")


def test_shape_error_says_both() -> None:
    assert str(shape_error("w", expected=(2, 3), got=torch.Size([3, 2]))) == "w has shape [3, 2], the config says [2, 3]"


def reference(config: ModelConfig) -> transformers.PreTrainedModel:
    """An empty transformers model of a config's shape."""
    keys = {key: getattr(config, key) for key in (*SHAPE, "rms_norm_eps", "tie_word_embeddings")}
    if config.architecture == "Gemma3ForCausalLM":
        ropes = {"full_attention": config.rope_theta, "sliding_attention": config.rope_local_theta}
        keys |= {"rope_parameters": {k: {"rope_theta": v, "rope_type": "default"} for k, v in ropes.items()}}
        keys |= {"layer_types": config.layer_types, "sliding_window": config.sliding_window}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**keys))
    keys |= {"rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys))


class HeadlessReader(gguf.GGUFReader):
    """Leaves out the vocabulary, on which transformers spends minutes."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        for name in ("tokens", "merges", "scores", "token_type"):
            self.fields.pop(f"tokenizer.ggml.{name}", None)


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "architecture", "eos", "quantization"),
    [("smollm2", "LlamaForCausalLM", [2], "Q4_1"), ("gemma3-270m", "Gemma3ForCausalLM", [1], "Q5_0")],
)
def test_real_models_equal_what_transformers_reads(
    name: str, architecture: str, eos: list[int], quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    monkeypatch.setattr(gguf, "GGUFReader", HeadlessReader)
    path = resolve_model(name).path
    config = load_model_config(path)
    assert (config.architecture, config.eos_token_ids, config.quantization) == (architecture, eos, quantization)
    with torch.device("meta"):
        empty = reference(config)
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=empty)["tensors"]
    assert len(expected) == len(dict(empty.named_parameters()))
    for key, tensor in iter_weights(path, "auto", config):
        assert torch.equal(tensor, expected.pop(key)), key
    assert not expected
