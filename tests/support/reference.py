"""What transformers says of a model, computed by one forward pass over a prompt and its continuation."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from banyan.model_executor.loader import iter_weights
from banyan.model_executor.model_config import load_model_config

TIE = 2e-3  # two tokens this close in log-probability may be chosen either way


def load_reference(path: str | Path) -> transformers.PreTrainedModel:
    """The model in float32, from a folder or a .gguf file.

    A GGUF file's config is read by transformers; its weights come through the project's loader, which the loader's own tests
    compare with transformers' (much slower) one.
    """
    path = Path(path)
    if path.suffix != ".gguf":
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dict(iter_weights(str(path), "gguf", load_model_config(str(path)))), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise AssertionError(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def worst_gap(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> float:
    """How much less likely, in log-probability, than the best token the chosen one was, at the worst step."""
    ids = torch.tensor([prompt + output])
    logits = model(ids, logits_to_keep=len(output) + 1).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logprobs.max(dim=-1).values - chosen).max())
