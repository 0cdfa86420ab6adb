"""PrefillPace: how long a chunk of a prompt may be, so that streams that decode beside it keep a target inter-token latency.

It learns from measured steps, so what it says must reach the scheduler as a message, like all that could differ between ranks.
"""

from __future__ import annotations

from collections import deque

FIRST_CHUNK = 64  # tokens, until something was measured
MIN_CHUNK = 16
HEADROOM = 0.9  # of the target: attention over a growing prompt makes each chunk a little dearer than the last
MEMORY = 8  # chunks that the cost of a token is taken from
SMOOTHING = 0.2  # weight of a new decode step
STEP_CHANGE = 0.1  # a smaller relative change is not worth a message


class PrefillPace:
    """t(step) = base + cost * tokens of the chunk: base a moving mean of pure decode steps, cost the worst of the last chunks."""

    def __init__(self, target_itl: float, *, max_chunk: int, page_size: int) -> None:
        """target_itl in seconds."""
        self._target = target_itl
        self._max_chunk = max_chunk
        self._page_size = page_size
        self._base = 0.0
        self._costs: deque[float] = deque(maxlen=MEMORY)
        self._announced = 0

    def observe(self, elapsed: float, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """A step took ``elapsed`` seconds on the device."""
        if num_prefill_tokens:
            base = self._base if num_decode_rows else 0.0
            self._costs.append(max(elapsed - base, 0.0) / num_prefill_tokens)
        elif num_decode_rows:
            self._base += SMOOTHING * (elapsed - self._base) if self._base else elapsed

    @property
    def chunk(self) -> int:
        """Tokens of the next chunk beside streams that decode; a multiple of the page size."""
        left = HEADROOM * self._target - self._base
        tokens = int(left / max(*self._costs, 1e-9)) if self._costs else FIRST_CHUNK
        tokens = min(max(tokens, MIN_CHUNK), self._max_chunk)
        return max(tokens // self._page_size, 1) * self._page_size

    def news(self) -> int | None:
        """The chunk if it has changed enough since the last call that returned one."""
        chunk = self.chunk
        if self._announced and abs(chunk - self._announced) <= STEP_CHANGE * self._announced:
            return None
        self._announced = chunk
        return chunk
