"""Fills a model's parameters from a checkpoint, or with dummies."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..layers.linear import MergedLinear
from ..layers.norm import GemmaRMSNorm, RMSNorm
from .loader import WeightsError, shape_error
from .models.blocks import DecoderModel

DUMMY_STD = 0.02


def load_weights(model: DecoderModel, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy each named tensor to where the model's load map says, in the model's dtype.

    Raises WeightsError that names a tensor which has no place, has another shape than the model, or is missing.
    """
    missing = _places(model)
    for name, tensor in weights:
        place = missing.pop(name, None)
        if place is None:
            raise WeightsError(f"unexpected tensor {name}: the model that the config describes has no place for it")
        if place.shape != tensor.shape:
            raise shape_error(name, expected=place.shape, got=tensor.shape)
        place.copy_(tensor)
    if missing:
        raise WeightsError(f"missing tensor {next(iter(missing))}, and {len(missing) - 1} others")


def dummy_weights(model: DecoderModel, seed: int) -> None:
    """Random weights, the same for the same seed; norms that change nothing."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(0.0 if isinstance(module, GemmaRMSNorm) else 1.0)
            else:
                parameter.normal_(0.0, DUMMY_STD, generator=generator)


def _places(model: DecoderModel) -> dict[str, torch.Tensor]:
    """Checkpoint name -> the parameter, or the rows of a merged one, that it fills."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for source, (merged, part) in model.LOAD_MAP.items():
        parts.setdefault(merged, []).append((source, part))
    places: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        parent, _, own_name = path.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                for source, part in parts[own_name]:
                    places[_checkpoint_name(model, f"{parent}.{source}.{kind}")] = module.part(parameter, part)
            else:
                places[_checkpoint_name(model, f"{path}.{kind}")] = parameter
    return places


def _checkpoint_name(model: DecoderModel, name: str) -> str:
    return name if name.startswith("lm_head.") else model.PREFIX + name
