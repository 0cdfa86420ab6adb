"""A prompt with several continuations in one request: a batch whose items are that prompt and one continuation each.

The scheduler computes what they share once (in-batch prefix caching). Log-probabilities, where they are asked for and no start is
given, begin at the first position at which any item departs from the prompt's own tokens: a text and its continuation are tokenised
together, so the border may move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import RequestError
from .request_size import check_joined

FIELD = "continuations"


def continued(prompts: list[Any], continuations: Sequence[Any], *, single: bool, kind: type | tuple[type, ...]) -> list[Any]:
    """One prompt per continuation. Raises RequestError unless there is one prompt and all are of its kind, str or list."""
    if not single:
        raise RequestError(f"{FIELD} belong to one prompt, not to a batch.", param=FIELD)
    if not continuations:
        raise RequestError(f"{FIELD} must not be empty.", param=FIELD)
    if not all(isinstance(item, kind) for item in continuations):
        what = "texts, as the prompt is one" if kind is str else "lists of token ids, as the prompt is one"
        raise RequestError(f"{FIELD} must be {what}.", param=FIELD)
    check_joined(prompts[0], continuations, FIELD)
    return [prompts[0] + (item if kind is str else list(item)) for item in continuations]


def departure(prompt: np.ndarray, items: Sequence[np.ndarray]) -> int:
    """First position at which any item departs from the prompt: its length where all go on from its end. Every item has a token
    there."""
    return max(0, min(min(_common(prompt, item), len(item) - 1) for item in items))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length
