"""Logit processors: classes of the server's operator, named by requests."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch


class LogitProcessor(Protocol):
    """Changes the logits of one request at each step. It must follow from its arguments: a retracted request gets a new one.

    It is called on the forward thread, after penalties, logit_bias and bans. One that raises fails its own request only.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        """params: the request's custom_params. Raise for bad ones."""

    def __call__(self, prompt_ids: torch.Tensor, output_ids: torch.Tensor, logits_V: torch.Tensor) -> torch.Tensor:
        """The new logits, float32 [V]; logits_V may be modified. The ids are int64 and must not be. All are on one device."""


def load_processors(places: Mapping[str, str]) -> dict[str, type[LogitProcessor]]:
    """Classes by name, from "module:Class" by name. Raises ValueError with one clear line."""
    return {name: _load(name, place) for name, place in places.items()}


def _load(name: str, place: str) -> type[LogitProcessor]:
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"logit processor {name!r}: {place!r} cannot be loaded: {error}") from None
    if not isinstance(found, type):
        raise ValueError(f"logit processor {name!r}: {place!r} is not a class")
    return found
