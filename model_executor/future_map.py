"""FutureMap: the newest token of each row, kept on the device, so that a step can be launched before its input is known."""

from __future__ import annotations

import torch


class FutureMap:
    """Steps run in order, so whatever a step publishes is there when the next one resolves."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._newest = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def resolve(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] with each negative id -r replaced by the token published last for row r."""
        return torch.where(input_ids < 0, self._newest[(-input_ids).clamp_(min=0)], input_ids)

    def publish(self, rows: torch.Tensor, next_ids: torch.Tensor) -> None:
        """Remember what rows sampled. A failed row (-1) gets id 0: its next step is computed in vain, but harms no other row."""
        self._newest.index_copy_(0, rows, next_ids.clamp(min=0))
