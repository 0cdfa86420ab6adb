"""What transformers says of a model, computed by one forward pass over a prompt and its continuation."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

TIE = 2e-3  # two tokens this close in log-probability may be chosen either way


def load_reference(path: str | Path) -> transformers.PreTrainedModel:
    """The model in float32, from a folder or a .gguf file."""
    path = Path(path)
    if path.suffix == ".gguf":
        config = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=config, dtype=torch.float32
        )
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def worst_gap(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> float:
    """How much less likely, in log-probability, than the best token the chosen one was, at the worst step."""
    ids = torch.tensor([prompt + output])
    logits = model(ids, logits_to_keep=len(output) + 1).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logprobs.max(dim=-1).values - chosen).max())
