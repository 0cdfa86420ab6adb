"""What to do when decoding runs out of slots: how much to reserve beforehand, and whom to send back. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20  # tokens per survivor that a retraction leaves room for


@dataclass(slots=True)
class NewTokenRatio:
    """The share of their remaining output that running requests are expected to use.

    Starts at ``init``, sinks to ``floor`` over 600 decode steps without a retraction; a retraction sets it to what was seen.
    """

    init: float
    floor: float
    value: float

    @classmethod
    def create(cls, conservativeness: float = 1.0) -> NewTokenRatio:
        init = min(INIT_RATIO * conservativeness, 1.0)
        return cls(init=init, floor=min(init * MIN_RATIO_FACTOR, 1.0), value=init)

    def decay(self) -> None:
        """After a decode step without a retraction."""
        self.value = max(self.value - (self.init - self.floor) / DECAY_STEPS, self.floor)

    def reset(self) -> None:
        """When nothing runs."""
        self.value = self.init

    def retracted(self, output_lens: np.ndarray, max_new_tokens: np.ndarray) -> None:
        """After a retraction; int arrays of the survivors. Never below the floor, so that decay only ever lowers it."""
        seen = float(output_lens.sum()) + RETRACT_DECODE_STEPS * len(output_lens)
        self.value = min(max(seen / (float(max_new_tokens.sum()) + 1), self.floor), 1.0)


def retraction_order(output_lens: np.ndarray, prompt_lens: np.ndarray) -> np.ndarray:
    """Indices of the running requests in the order in which to retract them: least output first, then longest prompt, then newest
    (the arrays are in the order of admission)."""
    newest_first = -np.arange(len(output_lens))
    return np.lexsort((newest_first, -prompt_lens, output_lens))
