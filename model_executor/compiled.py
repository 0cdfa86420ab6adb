"""torch.compile of a model's small steps. Attention is left out: what is compiled lies between, once for all layers of a kind and
for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..layers.attention.attention import Attention
from ..layers.forward_batch import ForwardBatch
from .models.blocks import DecoderModel
from .step import RunnerConfig

HiddenStates = Callable[[ForwardBatch], torch.Tensor]
BACKEND = "inductor"
DEFAULT_MAX_TOKENS = 32


def check_compile(config: RunnerConfig, *, native: bool) -> None:
    """Raises ValueError where torch.compile was asked for and cannot be had. native: the CPU kernels compute the layers."""
    if not config.enable_torch_compile:
        if config.torch_compile_max_bs is not None:
            raise ValueError("torch_compile_max_bs means nothing without enable_torch_compile")
        return
    obstacle = None
    if native:
        obstacle = "the native CPU kernels compute the layers (BANYAN_CPU_KERNELS=0 switches them off)"
    elif config.quantization is not None:
        obstacle = f"quantization {config.quantization} has kernels of its own"
    elif config.ranks.world_size > 1:
        obstacle = "the model is spread over ranks"
    elif config.enable_deterministic_inference:
        obstacle = "deterministic inference fixes the order of sums, a compiler does not"
    if obstacle is not None:
        raise ValueError(f"enable_torch_compile: {obstacle}")


class CompiledSteps:
    """Computes what DecoderModel.hidden_states does: compiled where a step has few tokens, else as it is."""

    def __init__(self, model: DecoderModel, max_tokens: int) -> None:
        for module in model.modules():
            if isinstance(module, Attention):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call]
        self._eager, self._max_tokens = model.hidden_states, max_tokens
        self._compiled: HiddenStates = torch.compile(model.hidden_states, dynamic=True, backend=BACKEND)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] of a step that the backend has planned."""
        small = len(batch.input_ids) <= self._max_tokens and not batch.embeds
        return (self._compiled if small else self._eager)(batch)
