"""Sampling parameters of one step as host arrays; imports no torch, so that the scheduler's side can fill it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .late_mask import LateMask

TOP_K_ALL = 1 << 30
FAILED = -1  # in place of a sampled id: the row's logits were not finite
NO_CHOICE = -2  # in place of a sampled id: all ids are banned


@dataclass(slots=True, kw_only=True)
class RowControls:
    """What changes the logits of one row, besides its SamplingInput: from the time when it is seated until it leaves.

    prompt_ids and output_ids are the tokens known when the row is seated; what it samples later, the runner adds itself.
    """

    prompt_ids: np.ndarray  # int32
    output_ids: np.ndarray  # int32, empty unless the request was retracted
    repetition_penalty: float = 1.0  # of tokens in prompt or output: positive logits are divided by it, others multiplied
    frequency_penalty: float = 0.0  # taken off per occurrence in the output
    presence_penalty: float = 0.0  # taken off once if in the output
    bias_ids: np.ndarray | None = None  # int32, distinct
    bias_values: np.ndarray | None = None  # float32
    allowed_ids: np.ndarray | None = None  # int32; no other token may be sampled
    bad_words: list[list[int]] = field(default_factory=list)  # token sequences that the output may not hold
    processor: str = ""  # name of a logit processor
    custom_params: dict[str, Any] = field(default_factory=dict)  # of the processor


@dataclass(slots=True)
class SamplingInput:
    """Sampling parameters of the S rows that sample, as arrays of length S."""

    temperatures: np.ndarray  # float32, 0 = greedy
    top_ps: np.ndarray  # float32, 1 = off
    top_ks: np.ndarray  # int32, TOP_K_ALL = off
    min_ps: np.ndarray  # float32, 0 = off
    seeds: np.ndarray  # int64, the request's seed
    positions: np.ndarray  # int64, index of the sampled token in its sequence: with the seed it determines the draw
    banned_rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # row in [0, S) of each banned pair
    banned_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # token id that row may not sample
    allowed: LateMask | None = None  # what rows that follow a grammar may sample; applied last
