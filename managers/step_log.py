"""StepLog: the scheduler's log lines, in the wording of SGLang, which scripts read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Loads(NamedTuple):
    """What the scheduler holds at the moment, in requests and tokens."""

    num_running: int
    num_waiting: int
    num_used_tokens: int  # slots neither free nor evictable
    num_tokens: int  # all slots
    num_pending_tokens: int = 0  # of the requests that wait, and what is left of the prompt that is computed in part

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / max(self.num_tokens, 1)


@dataclass(slots=True)
class StepLog:
    """A line per prefill step and one per ``decode_log_interval`` decode steps. Times are for these lines only."""

    decode_log_interval: int = 40
    decode_graph: bool = False  # the newest result of a decode step was replayed from a recording: CUDA graphs, or the CPU graph
    prefill_graph: bool = False  # the same of a step with prompts
    loads: Callable[[], Loads] = field(default=lambda: Loads(0, 0, 0, 0))
    gen_throughput: float = 0.0  # output tokens per second over the last log interval
    _prefilled: float = field(default_factory=time.monotonic)  # when the newest prefill line was written
    _interval_start: float = field(default_factory=time.monotonic)
    _interval_steps: int = 0
    _interval_tokens: int = 0

    def prefill(self, *, num_reqs: int, num_new: int, num_cached: int) -> None:
        """A prefill step was launched."""
        if not logger.isEnabledFor(logging.INFO):
            return
        now, loads = time.monotonic(), self.loads()
        throughput, self._prefilled = num_new / max(now - self._prefilled, 1e-9), now
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, #queue-req: %d, "
            "#pending-token: %d, cuda graph: %s, input throughput (token/s): %.2f",
            *(num_reqs, num_new, num_cached, loads.token_usage, loads.num_running, loads.num_waiting),
            *(loads.num_pending_tokens, self.prefill_graph, throughput),
        )

    def replayed(self, graph: bool, *, decode: bool) -> None:
        """A result is here. Lines are written when a step is launched, hence tell of the newest result."""
        if decode:
            self.decode_graph = graph
        else:
            self.prefill_graph = graph

    def decode(self, *, num_reqs: int) -> None:
        """A decode step was launched."""
        self._interval_steps += 1
        self._interval_tokens += num_reqs
        if self._interval_steps < self.decode_log_interval:
            return
        now = time.monotonic()
        self.gen_throughput = self._interval_tokens / max(now - self._interval_start, 1e-9)
        self._interval_start, self._interval_steps, self._interval_tokens = now, 0, 0
        if logger.isEnabledFor(logging.INFO):
            loads = self.loads()
            logger.info(
                "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, cuda graph: %s, gen throughput (token/s): %.2f, "
                "#queue-req: %d",
                *(num_reqs, loads.num_used_tokens, loads.token_usage, self.decode_graph, self.gen_throughput, loads.num_waiting),
            )
