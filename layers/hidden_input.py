"""Hidden states that cross the host: rows of a step that are given instead of looked up, and rows that are told. Imports no torch.

Legend: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class EmbedSpan:
    """Tokens [start, start + len(values)) have these embeddings, as the first layer takes them. Their ids mean nothing."""

    start: int
    values: np.ndarray  # float32 [K, H]


@dataclass(slots=True)
class HiddenSpan:
    """What the head would take of the step's tokens [start, start + count) is wanted. index counts the step's B requests."""

    index: int
    start: int
    count: int


def split_hidden(spans: Sequence[HiddenSpan], values: np.ndarray) -> list[np.ndarray]:
    """What a step returned for these spans, float32 [sum of counts * H], as one [count, H] each."""
    counts = [span.count for span in spans]
    return np.split(values.reshape(sum(counts), -1), np.cumsum(counts)[:-1])
