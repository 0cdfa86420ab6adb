"""What is known and not yet sent of the hidden states of one request.

It is told those of every token that it computes: of its prompt from where the cached prefix ends, then of each output token but the
last, which is never computed. A position is told once: after a retraction no more comes from the cache than was told before. A
request may want the newest state alone: then no other is asked of a step, nor kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .io_struct import GenerateReq, RowHidden


@dataclass(slots=True)
class ReqHidden:
    """Of one request. asked, taken: the first position whose state no launched, no absorbed step has brought; None before the first
    seat."""

    newest: bool = False
    asked: int = 0
    taken: int | None = None
    first: int = 0  # position of the first of the parts
    parts: list[np.ndarray] = field(default_factory=list)  # float32 [K, H], not sent yet

    @classmethod
    def of(cls, message: GenerateReq) -> ReqHidden | None:
        """None if the request does not want any."""
        return cls(newest=message.return_hidden_states == "last") if message.return_hidden_states else None

    def seated(self, num_cached: int) -> None:
        """The request got a row whose first tokens come from the cache."""
        if self.taken is None:
            self.taken = self.first = num_cached
        self.asked = self.taken

    def take(self, part: np.ndarray | None, end: int) -> None:
        """A step brought the states before position ``end``; part: None if their values are not known."""
        self.taken = end
        if part is None:
            return
        if self.newest:
            self.parts, self.first = [part], end - 1
        else:
            self.parts.append(part)

    def flush(self) -> RowHidden:
        """What has not been sent; the caller sends it."""
        values = b"".join([part.astype("<f4").tobytes() for part in self.parts])
        row = RowHidden(first=self.first, num=sum(map(len, self.parts)), values=values, newest=self.newest)
        self.first, self.parts = self.taken or 0, []
        return row


def embeds_of(message: GenerateReq) -> np.ndarray | None:
    """The embeddings that are a request's prompt, float32 [T, H]."""
    if not message.input_embeds:
        return None
    num_tokens = len(message.input_ids) // 4
    return np.frombuffer(message.input_embeds, "<f4").reshape(num_tokens, -1).copy()
