"""Fills a model's parameters from a checkpoint, or with dummies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from ..layers.embedding import Embedding
from ..layers.linear import Linear, MergedLinear
from ..layers.norm import GemmaRMSNorm, RMSNorm
from ..layers.quantization import Blocks
from .loader import WeightsError, shape_error
from .models.blocks import DecoderModel

DUMMY_STD = 0.02


class _Place(NamedTuple):
    """Where a tensor of the checkpoint goes: rows of a module's parameter."""

    module: nn.Module
    rows: torch.Tensor
    first_row: int


def load_weights(
    model: DecoderModel,
    weights: Iterable[tuple[str, torch.Tensor | Blocks]],
    filled: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """Copy each named tensor to where the model's load map says, in the model's dtype; linears and heads keep blocks as blocks.

    ``filled`` is called with each module as soon as all its parameters are there. Raises WeightsError that names a tensor which
    has no place, has another shape than the model, or is missing.
    """
    missing = _places(model)
    left = Counter(id(place.module) for place in missing.values())
    for name, value in weights:
        place = missing.pop(name, None)
        if place is None:
            raise WeightsError(f"unexpected tensor {name}: the model that the config describes has no place for it")
        if place.rows.shape != value.shape:
            raise shape_error(name, expected=place.rows.shape, got=value.shape)
        _fill(model, place, value)
        left[id(place.module)] -= 1
        if not left[id(place.module)]:
            filled(place.module)
    if missing:
        raise WeightsError(f"missing tensor {next(iter(missing))}, and {len(missing) - 1} others")


def _fill(model: DecoderModel, place: _Place, value: torch.Tensor | Blocks) -> None:
    module = place.module
    if isinstance(value, Blocks) and value.packable:
        if isinstance(module, Linear):
            module.blocks[place.first_row] = value
            return
        if isinstance(module, Embedding) and module is model.head:
            module.blocks[0] = value  # for the head; the lookup needs rows as well
    place.rows.copy_(value.dense() if isinstance(value, Blocks) else value)


def dummy_weights(model: DecoderModel, seed: int, filled: Callable[[nn.Module], None] = lambda module: None) -> None:
    """Random weights, the same for the same seed; norms that change nothing."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(0.0 if isinstance(module, GemmaRMSNorm) else 1.0)
            else:
                parameter.normal_(0.0, DUMMY_STD, generator=generator)
    for module in list(model.modules()):
        filled(module)


def _places(model: DecoderModel) -> dict[str, _Place]:
    """Checkpoint name -> the parameter, or the rows of a merged one, that it fills."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for source, (merged, part) in model.LOAD_MAP.items():
        parts.setdefault(merged, []).append((source, part))
    places: dict[str, _Place] = {}
    for path, module in model.named_modules():
        parent, _, own_name = path.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                for source, part in parts[own_name]:
                    rows, first = module.part(parameter, part), sum(module.sizes[:part])
                    places[_checkpoint_name(model, f"{parent}.{source}.{kind}")] = _Place(module, rows, first)
            else:
                places[_checkpoint_name(model, f"{path}.{kind}")] = _Place(module, parameter, 0)
    return places


def _checkpoint_name(model: DecoderModel, name: str) -> str:
    return name if name.startswith("lm_head.") else model.PREFIX + name
