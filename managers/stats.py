"""SchedulerStats: counters of what the scheduler did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .step_log import StepLog
from .tally import Clamped, Histogram

EVICTION_BOUNDS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1)  # seconds
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens


@dataclass(slots=True)
class StepStats:
    """Of forward steps, and of the time without any."""

    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0, "mixed": 0.0})  # on the device
    graph_passes: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("prefill_cuda_graph", "prefill_none", "decode_cuda_graph", "decode_none"), 0)
    )
    tokens: Histogram = field(default_factory=lambda: Histogram(Clamped(), STEP_BOUNDS))  # of each step
    idle_seconds: float = 0.0  # asleep, with nothing to compute

    def note(self, elapsed: float, num_prefill_tokens: int, num_decode_rows: int, *, graph: bool) -> None:
        """See SchedulerStats.step."""
        self.seconds["decode" if not num_prefill_tokens else "mixed" if num_decode_rows else "prefill"] += elapsed
        self.graph_passes[f"{'prefill' if num_prefill_tokens else 'decode'}_{'cuda_graph' if graph else 'none'}"] += 1
        self.tokens.observe(num_prefill_tokens + num_decode_rows)


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
    steps: StepStats = field(default_factory=StepStats)
    evictions: Histogram = field(default_factory=lambda: Histogram(Clamped(), EVICTION_BOUNDS))  # seconds of each
    weight_loads: dict[str, float] = field(default_factory=dict)  # seconds that the newest update took, by where it came from
    on_step: Callable[[float, int, int], None] | None = None  # told of seconds, prompt tokens and decoding rows of each step
    waiting_since: float = 0.0  # when the wait for the forward step under way began, 0 if there is none

    def step(self, elapsed: float, *, num_prefill_tokens: int, num_decode_rows: int, graph: bool = False) -> None:
        """A step's results are here; it took ``elapsed`` seconds on the device. graph: it was replayed from a recording."""
        self.log.replayed(graph, decode=not num_prefill_tokens)
        self.steps.note(elapsed, num_prefill_tokens, num_decode_rows, graph=graph)
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

    def evict(self, evict: Callable[[int], int], num_tokens: int) -> None:
        """Call ``evict``, and note how long it took if it freed anything."""
        begin = time.perf_counter()
        if evict(num_tokens):
            self.evictions.observe(time.perf_counter() - begin)

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
