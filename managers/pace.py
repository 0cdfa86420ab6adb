"""PrefillPace: how long a chunk of a prompt may be, so that streams that decode beside it keep a target inter-token latency.

It learns from measured steps, so what it says must reach the scheduler as a message, like all that could differ between ranks.
"""

from __future__ import annotations

from collections import deque

import msgspec

from .config import ModelInfo, SchedulerConfig

CPU_TARGET_MS = 250.0  # where nothing is asked for: streams are read as they come
CPU_SLACK = 4.0  # decode steps: a model whose steps are slow would get nowhere with prompts otherwise
FIRST_CHUNK = 64  # tokens, until something was measured
MIN_CHUNK = 16
HEADROOM = 0.9  # of the target: attention over a growing prompt makes each chunk a little dearer than the last
MEMORY = 8  # chunks that the cost of a token is taken from
SMOOTHING = 0.2  # weight of a new decode step
STEP_CHANGE = 0.1  # a smaller relative change is not worth a message


class PrefillPace:
    """t(step) = base + cost * tokens of the chunk: base a moving mean of pure decode steps, cost the worst of the last chunks."""

    def __init__(self, target_itl: float, *, max_chunk: int, page_size: int, slack: float = 0.0) -> None:
        """target_itl in seconds; a step may take ``slack`` decode steps where these are longer."""
        self._target = target_itl
        self._slack = slack
        self._max_chunk = max_chunk
        self._page_size = page_size
        self._base = 0.0
        self._costs: deque[float] = deque(maxlen=MEMORY)
        self._announced = 0

    def observe(self, elapsed: float, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """A step took ``elapsed`` seconds on the device."""
        if num_prefill_tokens >= MIN_CHUNK:  # a shorter one takes as long as reading the weights
            base = self._base if num_decode_rows else 0.0
            self._costs.append(max(elapsed - base, 0.0) / num_prefill_tokens)
        elif num_decode_rows and not num_prefill_tokens:
            self._base += SMOOTHING * (elapsed - self._base) if self._base else elapsed

    @property
    def chunk(self) -> int:
        """Tokens of the next chunk beside streams that decode; a multiple of the page size."""
        left = HEADROOM * max(self._target, self._slack * self._base) - self._base
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


def with_pace(config: SchedulerConfig, model: ModelInfo) -> SchedulerConfig:
    """The config with the target that holds where none is given: on a CPU a long prompt takes seconds, which streams must not."""
    wants_none = config.target_itl_ms is not None or config.enable_mixed_chunk or config.prefill_decode_interval
    whole = config.chunked_prefill_size is not None and config.chunked_prefill_size <= 0
    if wants_none or whole or model.device != "cpu" or model.load_format == "oracle" or model.stages > 1:
        return config
    return msgspec.structs.replace(config, target_itl_ms=CPU_TARGET_MS, target_itl_slack=CPU_SLACK)


def explain_pace(config: SchedulerConfig) -> str:
    """For people, of a config that went through ``with_pace``."""
    if not config.target_itl_ms:
        return "off: streams wait for the prompts that come" + ("" if config.target_itl_ms is None else ", as given")
    if not config.target_itl_slack:
        return f"{config.target_itl_ms:g}, as given"
    return f"{config.target_itl_ms:g}, the default on cpu, or {config.target_itl_slack:g} decode steps where these are longer"
