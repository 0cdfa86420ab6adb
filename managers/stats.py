"""SchedulerStats: counters of what the scheduler did, and its log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Loads(NamedTuple):
    """What the scheduler holds at the moment, in requests and tokens."""

    num_running: int
    num_waiting: int
    num_used_tokens: int  # slots neither free nor evictable
    num_tokens: int  # all slots

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / max(self.num_tokens, 1)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. Times are used for log lines only, never for a decision."""

    decode_log_interval: int = 40
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_decode_tokens: int = 0
    num_retracted: int = 0
    num_aborted: int = 0
    num_refused: int = 0  # the queue was full
    gen_throughput: float = 0.0  # output tokens per second over the last log interval
    loads: Callable[[], Loads] = field(default=lambda: Loads(0, 0, 0, 0))
    on_step: Callable[[float, int, int], None] | None = None  # told of seconds, prompt tokens and decoding rows of each step
    waiting_since: float = 0.0  # when the wait for the forward step under way began, 0 if there is none
    _interval_start: float = field(default_factory=time.monotonic)
    _interval_tokens: int = 0

    def step(self, elapsed: float, *, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """A step's results are here; it took ``elapsed`` seconds on the device."""
        if self.on_step:
            self.on_step(elapsed, num_prefill_tokens, num_decode_rows)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for a forward step."""
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = 0.0

    def prefill(self, *, num_reqs: int, num_new: int, num_cached: int) -> None:
        """A prefill step was launched."""
        self.num_prefill_steps += 1
        self.num_prefill_tokens += num_new
        self.num_cached_tokens += num_cached
        if logger.isEnabledFor(logging.INFO):
            loads = self.loads()
            logger.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, "
                "token usage: %.2f, #running-req: %d, #queue-req: %d",
                *(num_reqs, num_new, num_cached, loads.token_usage, loads.num_running, loads.num_waiting),
            )

    def decode(self, *, num_reqs: int) -> None:
        """A decode step was launched."""
        self.num_decode_steps += 1
        self.num_decode_tokens += num_reqs
        self._interval_tokens += num_reqs
        if self.num_decode_steps % self.decode_log_interval == 0:
            now = time.monotonic()
            self.gen_throughput = self._interval_tokens / max(now - self._interval_start, 1e-9)
            self._interval_start, self._interval_tokens = now, 0
            if logger.isEnabledFor(logging.INFO):
                loads = self.loads()
                logger.info(
                    "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, gen throughput (token/s): %.2f, #queue-req: %d",
                    *(num_reqs, loads.num_used_tokens, loads.token_usage, self.gen_throughput, loads.num_waiting),
                )
