"""Tiny random checkpoints, and what an Engine over one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from harness import CONFIG
from tiny_tokenizers import byte_level_folder

from banyan import Engine

PROMPT = list(range(100, 140))
PARAMS = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
NAME = "model.layers.0.self_attn.q_proj.weight"


def save_model(folder: Path, seed: int, **more: Any) -> str:
    torch.manual_seed(seed)
    names = {name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type", "torch_dtype")}
    config = transformers.LlamaConfig(**{**names, **more}, pad_token_id=None, initializer_range=0.5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(byte_level_folder(folder) and folder)


def run(engine: Engine, **more: Any) -> Any:
    return engine.generate(input_ids=PROMPT, sampling_params=PARAMS, **more)


def ids_and_cached(engine: Engine, **more: Any) -> tuple[list[int], int]:
    answer = run(engine, **more)
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]
