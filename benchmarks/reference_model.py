"""transformers' side of a comparison: the same weights, generated from as its users do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from banyan.model_executor.loader import iter_weights
from banyan.model_executor.model_config import load_model_config


class _Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Notes when each token is there; never stops anything."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Reference:
    """A causal model of transformers and its greedy ``generate`` with its default KV cache and attention."""

    def __init__(self, path: Path, *, dtype: str, device: str) -> None:
        """The model of a folder in HF layout or a .gguf file, whose config transformers reads and whose weights come through this
        project's loader (transformers' own dequantises to the same numbers, slowly)."""
        self._device = device
        self._model = (
            _from_gguf(path, getattr(torch, dtype)) if path.suffix == ".gguf" else _from_folder(path, getattr(torch, dtype))
        )
        self._model.to(device).eval()
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)

    @torch.inference_mode()
    def run(self, prompts: np.ndarray, num_steps: int) -> tuple[float, np.ndarray]:
        """Generate num_steps tokens after the first from prompts [B, T].

        (seconds, ids [B, num_steps + 1]): with num_steps 0 the time from the call to the first token, else the mean time between
        two tokens.
        """
        ids = torch.from_numpy(prompts).to(self._device)
        clock = _Clock()
        begin = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_steps + 1,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        if len(clock.times) != num_steps + 1:
            raise RuntimeError(f"transformers generated {len(clock.times)} tokens, not {num_steps + 1}")
        seconds = (clock.times[-1] - clock.times[0]) / num_steps if num_steps else clock.times[0] - begin
        return seconds, output[:, prompts.shape[1] :].cpu().numpy()


def _from_folder(path: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _from_gguf(path: Path, dtype: torch.dtype) -> Any:
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = dict(iter_weights(str(path), "gguf", load_model_config(str(path))))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{path}: weights that transformers lacks: {missing}, that it does not know: {unexpected}")
    model.tie_weights()
    return model
