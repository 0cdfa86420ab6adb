"""Which log-probabilities a step is asked for, and how they come back, as host arrays. Imports no torch.

Legend: K positions of one request, N alternatives asked for, M named ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

LOGPROB_FLOOR = -9999.0  # in place of anything smaller, minus infinity above all, which JSON does not know


@dataclass(slots=True, kw_only=True)
class LogprobRequest:
    """Log-probabilities at consecutive positions of one request.

    In the prompt: index counts the step's B requests, start is the first position's index in the step's T tokens, and targets
    [K] are the tokens that follow each position. At the sampled position: index counts the S rows that sample, targets is None.
    """

    index: int
    start: int = 0
    targets: np.ndarray | None = None  # int64
    top_num: int = 0
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64 [M]

    @property
    def num_positions(self) -> int:
        return 1 if self.targets is None else len(self.targets)


@dataclass(slots=True)
class LogprobArrays:
    """Answer to a LogprobRequest, all float32 but top_ids."""

    values: np.ndarray  # [K]
    top_values: np.ndarray  # [K, N], descending
    top_ids: np.ndarray  # int32 [K, N]
    id_values: np.ndarray  # [K, M]


def packed_sizes(requests: Sequence[LogprobRequest]) -> tuple[int, int]:
    """How many values and how many ids a step returns for these requests."""
    num_values = sum(request.num_positions * (1 + request.top_num + len(request.token_ids)) for request in requests)
    return num_values, sum(request.num_positions * request.top_num for request in requests)


def unpack_logprobs(
    requests: Sequence[LogprobRequest], values: np.ndarray, top_ids: np.ndarray
) -> Iterator[tuple[LogprobRequest, LogprobArrays]]:
    """Split what a step returned: per request [K] values, [K, N] top values and [K, M] values of named ids, all flat, and apart
    from them the [K, N] ids."""
    at = at_ids = 0
    for request in requests:
        num, top, named = request.num_positions, request.top_num, len(request.token_ids)
        bounds = np.cumsum([at, num, num * top, num * named])
        own, best, chosen = (values[start:end] for start, end in itertools.pairwise(bounds))
        ids = top_ids[at_ids : at_ids + num * top]
        at, at_ids = int(bounds[-1]), at_ids + num * top
        yield request, LogprobArrays(own, best.reshape(num, top), ids.reshape(num, top), chosen.reshape(num, named))
