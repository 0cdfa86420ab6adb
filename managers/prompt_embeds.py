"""Prompts that are given as embeddings: their shape in a request, and what the scheduler is told of them.

The embeddings are what the first layer takes, after whatever the model multiplies its own by. A prompt of them has no token ids: it
travels with zeros in their place, and shares KV with the very same embeddings only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import RequestError
from .generation import GenerateInput

PARAM = "input_embeds"


def embeds_prompts(request: GenerateInput) -> tuple[list[Any], bool]:
    """The prompts, and whether the request has the form of a single one. Raises RequestError for what goes with ids only."""
    given = request.input_embeds
    if not given or not isinstance(given[0], Sequence) or not given[0]:
        raise _shape()
    for name in ("session_params", "continuations", "return_prompt_token_ids"):
        if getattr(request, name):
            raise RequestError(f"{name}: a prompt of embeddings has no token ids.", param=name)
    single = not isinstance(given[0][0], Sequence)
    return ([given] if single else given), single


def checked_embeds(values: Any, hidden_size: int) -> np.ndarray:
    """One prompt as float32 [T, hidden]. Raises RequestError."""
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        raise _shape() from None
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.size:
        raise _shape()
    if array.shape[1] != hidden_size:
        raise RequestError(f"{PARAM}: embeddings of this model have {hidden_size} numbers, got {array.shape[1]}.", param=PARAM)
    with np.errstate(over="ignore"):
        embeds = array.astype("<f4")
    if not np.isfinite(embeds).all():
        raise RequestError(f"{PARAM} must be finite as 32-bit floats.", param=PARAM)
    return embeds


def embeds_key(embeds: np.ndarray) -> str:
    """Under this name in the cache: the same for the same embeddings only."""
    return hashlib.blake2b(embeds.tobytes(), digest_size=16).hexdigest()


def _shape() -> RequestError:
    return RequestError(
        f"{PARAM} must be a list of embeddings, each a list of numbers of one length, or a list of such prompts.", param=PARAM
    )
