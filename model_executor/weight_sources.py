"""Where the weights of a model come from now: a checkpoint, and what was laid over it since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..layers.quantization import Blocks
from .loader import WeightsError, iter_weights
from .model_config import ModelConfig
from .shard import Shard
from .step import RunnerConfig

OVERLAY = "model.safetensors"  # the file in the folder of an overlay
MAX_VALUES = 1 << 20  # of one tensor that are told


class WeightSources:
    """An immutable list of places, the newest first. ``base`` is a checkpoint, the others are folders of an OVERLAY."""

    def __init__(self, config: ModelConfig, base: str, load_format: str, overlays: tuple[str, ...] = ()) -> None:
        self._config = config
        self.base = base
        self.load_format = load_format
        self.overlays = overlays

    def is_checkpoint_of(self, config: RunnerConfig) -> bool:
        """Whether these are the weights that the config names, with nothing laid over them."""
        return not self.overlays and (self.base, self.load_format) == (config.model_path, config.load_format)

    def with_overlay(self, folder: str) -> WeightSources:
        """These, and the tensors in ``folder`` in the place of those with the same names. WeightsError for a damaged file."""
        if self.load_format == "dummy":
            raise WeightsError("dummy weights cannot be updated in part; load a whole checkpoint first")
        _names(folder)
        return WeightSources(self._config, self.base, self.load_format, (folder, *self.overlays))

    def tensors(self, shard: Shard | None = None, *, keep_blocks: bool = False) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
        """As iter_weights. An overlay's tensor whose name is no parameter of the model is an error of who fills the model."""
        seen: set[str] = set()
        for folder in self.overlays:
            for name, tensor in iter_weights(folder, "safetensors", self._config, shard):
                if name not in seen:
                    seen.add(name)
                    yield name, tensor
        for name, tensor in iter_weights(self.base, self.load_format, self._config, shard, keep_blocks=keep_blocks):
            if name not in seen:
                yield name, tensor

    def values(self, name: str, limit: int) -> list[float]:
        """The first ``limit`` values of a tensor by its name in a checkpoint. Raises WeightsError for one that is not there."""
        if self.load_format == "dummy":
            raise WeightsError("dummy weights have no file to read them from")
        for found, tensor in self.tensors():
            if found == name and isinstance(tensor, torch.Tensor):
                return [float(value) for value in tensor.flatten()[: min(limit, MAX_VALUES)].float()]
        raise WeightsError(f"the model has no tensor {name!r}")


def _names(folder: str) -> set[str]:
    path = Path(folder) / OVERLAY
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"the tensors are no safetensors: {error}") from None
