"""Deadlines of requests, in the scheduler's own time: the ``now`` of the newest Tick message, never a clock."""

from __future__ import annotations

import heapq
import math

from .io_struct import FinishReason
from .req import Req

QUEUE, RUNNING, OWN = "queue", "running", "own"
COMPACT_ABOVE = 64  # stale entries that the heap may hold besides as many as it has live ones


def _reason(message: str, status_code: int, err_type: str) -> FinishReason:
    return FinishReason(kind="abort", message=message, status_code=status_code, err_type=err_type)


REASONS = {
    QUEUE: _reason("Request waiting timeout reached.", 503, "ServiceUnavailableError"),
    RUNNING: _reason("Request running timeout reached.", 503, "ServiceUnavailableError"),
    OWN: _reason("Request deadline reached.", 504, "DeadlineExceededError"),
}


class Deadlines:
    """A heap of (time, rid, kind). O(log n) per entry; nothing is ever scanned.

    Disarmed entries stay in the heap until they come up, or until they outnumber the others.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, str]] = []
        self._armed: dict[tuple[str, str], int] = {}  # (rid, kind) -> number of its one valid entry
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._armed)

    @property
    def size(self) -> int:
        """Entries in memory, the stale ones too."""
        return len(self._heap)

    def arm(self, rid: str, kind: str, at: float) -> None:
        """Set the deadline, in the place of an earlier one of the same kind."""
        self._num_made += 1
        self._armed[rid, kind] = self._num_made
        heapq.heappush(self._heap, (at, self._num_made, rid, kind))
        if len(self._heap) > 2 * len(self._armed) + COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def disarm(self, rid: str, kind: str) -> None:
        """Forget a deadline, if there is one."""
        self._armed.pop((rid, kind), None)

    def is_armed(self, rid: str, kind: str) -> bool:
        return (rid, kind) in self._armed

    def next_due(self) -> float:
        """Time of the first deadline; infinity if there is none."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop_due(self, now: float) -> tuple[str, str] | None:
        """(rid, kind) of the first deadline that has come, which is disarmed by this."""
        if self.next_due() > now:
            return None
        _, _, rid, kind = heapq.heappop(self._heap)
        del self._armed[rid, kind]
        return rid, kind

    def _is_valid(self, entry: tuple[float, int, str, str]) -> bool:
        return self._armed.get((entry[2], entry[3])) == entry[1]


class Timers:
    """How long each request may take, in seconds; None: no limit.

    queue_timeout counts from arrival until a request is first given a row, running_timeout from there to its end, whether or not
    it is retracted in between: together they bound its life. A request's own timeout counts from its arrival.
    """

    def __init__(self, *, queue_timeout: float | None = None, running_timeout: float | None = None) -> None:
        self.now = 0.0
        self._queue_timeout = queue_timeout
        self._running_timeout = running_timeout
        self._deadlines = Deadlines()

    def arrived(self, req: Req) -> None:
        """A request was queued for the first time."""
        if self._queue_timeout is not None:
            self._deadlines.arm(req.rid, QUEUE, self.now + self._queue_timeout)
        if req.timeout is not None:
            self._deadlines.arm(req.rid, OWN, self.now + req.timeout)

    def seated(self, req: Req) -> None:
        """A request got a row, maybe not for the first time."""
        self._deadlines.disarm(req.rid, QUEUE)
        if self._running_timeout is not None and not self._deadlines.is_armed(req.rid, RUNNING):
            self._deadlines.arm(req.rid, RUNNING, self.now + self._running_timeout)

    def ended(self, req: Req) -> None:
        """A request has left, for whatever reason."""
        for kind in REASONS:
            self._deadlines.disarm(req.rid, kind)

    def next_due(self) -> float:
        """When something is due next; infinity: never."""
        return self._deadlines.next_due()

    def pop_due(self) -> tuple[str, FinishReason] | None:
        """A rid whose time is over, and what to tell it; None when there is none left."""
        due = self._deadlines.pop_due(self.now)
        return (due[0], REASONS[due[1]]) if due else None
