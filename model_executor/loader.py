"""Reads the weights of a model one tensor at a time, under the names and in the layout of its Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from ..layers.quantization import Blocks
from .gguf_file import GGUFFile, GGUFTensor
from .model_config import ModelConfig
from .shard import Shard, Slice

__all__ = ["WeightsError", "iter_weights", "shape_error"]

T = TypeVar("T", bound=np.generic)
INDEX = "model.safetensors.index.json"


class WeightsError(ValueError):
    """Weights that are missing, damaged or do not fit the config. The message is one line and names the file or tensor."""


def shape_error(name: str, *, expected: Sequence[int], got: Sequence[int]) -> WeightsError:
    """The error for a tensor whose shape is not what the config says."""
    return WeightsError(f"{name} has shape {list(got)}, the config says {list(expected)}")


def iter_weights(
    path: str, load_format: str, config: ModelConfig, shard: Shard | None = None, *, keep_blocks: bool = False
) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    """Yield (parameter name, tensor) for every weight of the checkpoint, one in memory at a time.

    shard: only what that part of the model holds, under its own names; the rest of the file is not read.

    ``load_format`` is auto, safetensors or gguf. Tensors come in the dtype of the file (GGUF: float32) and may be read-only views
    of a mapped file: copy, never write. Rotary buffers are left out, and lm_head.weight where the embeddings are tied.
    With ``keep_blocks`` matrices of a GGUF file come as blocks where the kernels can keep them.
    Raises WeightsError, or GGUFError for a damaged GGUF file.
    """
    is_file = os.path.isfile(path)
    if load_format not in ("auto", "safetensors", "gguf"):
        raise WeightsError(f"load format {load_format!r} reads no weights; auto, safetensors and gguf do")
    if load_format == ("safetensors" if is_file else "gguf"):
        raise WeightsError(f"{path} does not hold weights in the format {load_format}")
    shard = shard or Shard(config)

    def wanted(name: str) -> bool:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            return False
        return shard.is_whole or shard.local_name(name) is not None  # a whole model refuses what it has no place for

    weights = _gguf_weights(path, shard, wanted, keep_blocks) if is_file else _safetensors_weights(path, shard, wanted)
    for name, tensor in weights:
        if isinstance(tensor, torch.Tensor) and shard.is_summed_bias(name):
            tensor = torch.zeros_like(tensor)
        yield shard.local_name(name) or name, tensor


def _safetensors_weights(folder: str, shard: Shard, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    seen: set[str] = set()
    files, expected = safetensors_files(folder)
    for file in files:
        try:
            with safe_open(file, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 - not a dict
                    if name not in seen:
                        seen.add(name)
                        if wanted(name):
                            yield name, _read(f, name, shard.slice_of(name))
        except (SafetensorError, OSError) as e:
            raise WeightsError(f"{file} cannot be read: {e}") from None
    if missing := sorted(expected - seen):
        raise WeightsError(f"{folder}: {len(missing)} weights named in {INDEX} are in none of its files, {missing[0]} is the first")


def _read(file: Any, name: str, part: Slice | None) -> torch.Tensor:
    if part is None:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor
    view = file.get_slice(name)
    size = view.get_shape()[part.dim]
    if size < part.stop:
        raise WeightsError(f"{name} has {size} rows or columns, the config says at least {part.stop}")
    sliced: torch.Tensor = view[part.start : part.stop] if part.dim == 0 else view[:, part.start : part.stop]
    return sliced


def safetensors_files(folder: str) -> tuple[list[Path], set[str]]:
    """The files that hold a folder's weights and the names that its index promises (none without an index). Raises WeightsError."""
    root = Path(folder)
    index = root / INDEX
    if index.exists():
        try:
            names = dict(json.loads(index.read_bytes())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise WeightsError(f"{index} cannot be read: {e!r}") from None
        files = [root / str(f) for f in dict.fromkeys(names.values())]
        for file in files:
            if file.parent != root or not file.is_file():
                raise WeightsError(f"{index} names {file.name}, which is not in its folder")
        return files, set(names)
    if (root / "model.safetensors").is_file():
        return [root / "model.safetensors"], set()
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no .safetensors files")
    return files, set()


def _gguf_weights(
    path: str, shard: Shard, wanted: Callable[[str], bool], keep_blocks: bool
) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    gguf = GGUFFile(path)
    arch = str(gguf.metadata.get("general.architecture"))
    for gguf_name in gguf.tensors:
        if gguf_name == "rope_freqs.weight":
            continue  # became part of the config
        name = hf_name(gguf_name, arch)
        if name is None:
            raise WeightsError(f"{path}: tensor {gguf_name} is not known for architecture {arch}")
        if not wanted(name):
            continue
        part = shard.slice_of(name)
        heads = _rope_heads(name, shard.local) if arch == "llama" else 0
        if keep_blocks and (part is None or part.dim == 0):
            blocks = _blocks(gguf, gguf.tensors[gguf_name], part, heads, name)
            if blocks.packable:
                yield name, blocks
                continue
        data = gguf.tensor(gguf_name) if part is None else gguf.part(gguf_name, *part)
        if arch == "gemma3" and name.endswith("norm.weight"):
            data -= 1  # the file's norms multiply by w, the checkpoint's by 1 + w
        elif heads:
            data = _unpermute(data, heads, name)
        yield name, torch.from_numpy(data)


def _blocks(gguf: GGUFFile, tensor: GGUFTensor, part: Slice | None, heads: int, name: str) -> Blocks:
    """A tensor, or some of its rows, as it lies in the file, the rows in the order of the checkpoint."""
    rows = gguf.raw(tensor.name).reshape(tensor.shape[0], -1)
    start, stop = (0, len(rows)) if part is None else (part.start, part.stop)
    rows = rows[start:stop].copy()  # torch takes no read-only memory without a warning
    rows = _unpermute(rows, heads, name) if heads else rows
    shape = (len(rows), *tensor.shape[1:])
    return Blocks(tensor.type, torch.from_numpy(rows), shape, lambda: torch.from_numpy(gguf.part(tensor.name, 0, start, stop)))


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def hf_name(gguf_name: str, arch: str) -> str | None:
    """The checkpoint's name of a GGUF tensor, None where there is none."""
    match = _NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else None
    parts = _GEMMA3_LAYER if arch == "gemma3" else _LAYER
    return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else None


def _rope_heads(name: str, config: ModelConfig) -> int:
    """Heads of a q or k projection, 0 for any other parameter."""
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def _unpermute(data: npt.NDArray[T], heads: int, name: str) -> npt.NDArray[T]:
    """Undo llama.cpp's order of the rows of q and k.

    There a rotated pair is two neighbouring rows; in the checkpoint the pair's second row is head_dim / 2 further on.
    """
    if data.shape[0] % (2 * heads):
        raise WeightsError(f"{name} has {data.shape[0]} rows, which is not {heads} heads of even size")
    pairs = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)
