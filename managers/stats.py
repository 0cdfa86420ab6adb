"""SchedulerStats: counters of what the scheduler did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .step_log import StepLog


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. Times are never for a decision."""

    log: StepLog = field(default_factory=StepLog)
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_decode_tokens: int = 0
    num_retracted: int = 0
    retracted_tokens: tuple[int, int] = (0, 0)  # of the prompts and of the outputs of the retracted requests
    num_aborted: int = 0
    num_refused: int = 0  # the queue was full
    forward_seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0, "mixed": 0.0})
    on_step: Callable[[float, int, int], None] | None = None  # told of seconds, prompt tokens and decoding rows of each step
    waiting_since: float = 0.0  # when the wait for the forward step under way began, 0 if there is none

    def step(self, elapsed: float, *, num_prefill_tokens: int, num_decode_rows: int, graph: bool = False) -> None:
        """A step's results are here; it took ``elapsed`` seconds on the device. graph: it was replayed from a recording."""
        self.log.replayed(graph, decode=not num_prefill_tokens)
        kind = "decode" if not num_prefill_tokens else "mixed" if num_decode_rows else "prefill"
        self.forward_seconds[kind] += elapsed
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
        self.log.prefill(num_reqs=num_reqs, num_new=num_new, num_cached=num_cached)

    def decode(self, *, num_reqs: int) -> None:
        """A decode step was launched."""
        self.num_decode_steps += 1
        self.num_decode_tokens += num_reqs
        self.log.decode(num_reqs=num_reqs)

    def retracted(self, num_prompt: int, num_output: int) -> None:
        """A request lost its row and its KV for want of memory, or for one with a higher priority."""
        prompts, outputs = self.retracted_tokens
        self.num_retracted += 1
        self.retracted_tokens = prompts + num_prompt, outputs + num_output
