"""What is known and not yet sent of the log-probabilities of one request.

Positions of a prompt that come from the cache have no logits, so a prefix match ends one token before the first prompt position
whose value is still missing (``max_match``). That holds for a retracted request too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...layers.logprob_input import LogprobArrays, LogprobRequest
from ..io_struct import LogprobColumns, LogprobParams, RowLogprobs


@dataclass(slots=True)
class ReqLogprobs:
    """Of one request. next_input: the first prompt position whose value is missing; position 0 has none. num_input: where the
    values of the prompt end, its length or one more."""

    params: LogprobParams
    num_prompt: int
    num_input: int
    next_input: int
    input: list[LogprobArrays] = field(default_factory=list)  # not sent yet
    output: list[LogprobArrays] = field(default_factory=list)  # one per token that is not sent yet
    input_sent: bool = False

    @classmethod
    def of(cls, params: LogprobParams, num_prompt: int) -> ReqLogprobs:
        return cls(params, num_prompt, num_prompt + params.after_prompt, max(params.start_len, 1))

    @property
    def max_match(self) -> int | None:
        """Longest prefix that may come from the cache; None: no limit."""
        return self.next_input - 1 if self.next_input < self.num_input else None

    def request(self, index: int, *, start: int = 0, targets: np.ndarray | None = None) -> LogprobRequest:
        return LogprobRequest(
            index=index,
            start=start,
            targets=targets,
            top_num=self.params.top_num,
            token_ids=np.array(self.params.token_ids, np.int64),
        )

    def flush(self) -> RowLogprobs:
        """What has not been sent; the caller sends it."""
        row = RowLogprobs(output=_columns(self.output), input=None if self.input_sent else _columns(self.input))
        self.input, self.output, self.input_sent = [], [], True
        return row


def _columns(arrays: list[LogprobArrays]) -> LogprobColumns:
    return LogprobColumns(
        values=b"".join([each.values.astype("<f4").tobytes() for each in arrays]),
        top_values=b"".join([each.top_values.astype("<f4").tobytes() for each in arrays]),
        top_ids=b"".join([each.top_ids.astype("<i4").tobytes() for each in arrays]),
        id_values=b"".join([each.id_values.astype("<f4").tobytes() for each in arrays]),
    )
