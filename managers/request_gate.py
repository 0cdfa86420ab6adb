"""RequestGate: who may come into the scheduler, for how long, and whether anything is served at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from .deadlines import Timers
from .io_struct import FinishReason

QUEUE_FULL_MESSAGE = "The request queue is full."
QUEUE_FULL = FinishReason(kind="abort", message=QUEUE_FULL_MESSAGE, status_code=503, err_type="ServiceUnavailableError")
DISPLACED = FinishReason(
    kind="abort",
    message="The request is aborted by a higher priority request.",
    status_code=503,
    err_type="ServiceUnavailableError",
)


def max_live_requests(max_running: int, max_queued: int | None) -> int | None:
    """Requests that may be alive at once; None: any number. One that finds a free row does not count as queued."""
    return None if max_queued is None else max_running + max_queued


@dataclass(slots=True)
class RequestGate:
    """max_live: see ``max_live_requests``. paused: no step is begun; requests are queued, and time-outs go on. closed: no request
    is admitted, those that run go on. released: what memory was given back, "weights" or "kv_cache"."""

    max_live: int | None = None
    timers: Timers = field(default_factory=Timers)
    paused: bool = False
    closed: bool = False
    released: frozenset[str] = frozenset()

    def is_full(self, num_live: int) -> bool:
        """No further request may come in unless another goes."""
        return self.max_live is not None and num_live >= self.max_live
