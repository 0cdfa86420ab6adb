"""Quiesce: control messages whose deed waits until no step is under way (flush, pause). Each is answered once, when it is done."""

from __future__ import annotations

from collections.abc import Callable

from .io_struct import ContinueReq, ControlReply, FinishReason, FlushCacheReq, PauseReq
from .scheduler import Scheduler

MODES = ("abort", "retract", "in_place")
PAUSED = FinishReason(kind="abort", message="Abort by a pause of generation.")


class Quiesce:
    """``serve`` is called before and after each reception of messages, which is where the two loops know what is under way.

    A launched step may still write slots that the tree owns and hold rows that look free, so nothing is flushed or retracted
    before it is absorbed.
    """

    def __init__(self, scheduler: Scheduler, reply: Callable[[ControlReply], None]) -> None:
        self._scheduler = scheduler
        self._reply = reply
        self._flushes: list[tuple[int, float]] = []  # call_id, deadline in the scheduler's time
        self._pauses: list[PauseReq] = []

    def flush(self, message: FlushCacheReq) -> None:
        self._flushes.append((message.call_id, self._scheduler.gate.timers.now + message.timeout))

    def pause(self, message: PauseReq) -> None:
        """From now on no step is begun. Mode abort ends who is here now; who comes later waits for the end of the pause."""
        scheduler = self._scheduler
        if message.mode not in MODES:
            text = f"mode must be one of {', '.join(MODES)}, got {message.mode!r}."
            self._reply(ControlReply(call_id=message.call_id, success=False, message=text))
            return
        scheduler.gate.paused = True
        if message.mode == "abort":
            for rid in list(scheduler.live):
                scheduler.abort(rid, PAUSED)
        self._pauses.append(message)

    def resume(self, message: ContinueReq) -> None:
        """End the pause; pauses that are not answered yet are answered with a failure."""
        self._scheduler.gate.paused = False
        for pause in self._pauses:
            self._reply(ControlReply(call_id=pause.call_id, success=False, message="Generation was continued meanwhile."))
        self._pauses.clear()
        self._reply(ControlReply(call_id=message.call_id, message="Generation continued successfully."))

    def next_due(self) -> float:
        """When the first flush gives up; infinity if none waits."""
        return min((deadline for _, deadline in self._flushes), default=float("inf"))

    def serve(self, *, in_flight: bool) -> None:
        """Do what can be done now. in_flight: a launched step is not absorbed yet."""
        if self._pauses and not in_flight:
            self._finish_pauses()
        if self._flushes:
            self._flushes = [flush for flush in self._flushes if not self._answered(*flush, in_flight=in_flight)]

    def forget_cache(self) -> int:
        """Empty the cache, pins and what sessions hold included; the number of these. Only while no request has a row."""
        memory = self._scheduler.memory
        memory.pins.clear()
        num_held = memory.holds.clear()
        memory.cache.reset()
        return num_held

    def _finish_pauses(self) -> None:
        for message in self._pauses:
            if message.mode == "retract":
                self._scheduler.retract_all()
            self._reply(ControlReply(call_id=message.call_id, message="Generation paused successfully."))
        self._pauses.clear()

    def _answered(self, call_id: int, deadline: float, *, in_flight: bool) -> bool:
        scheduler = self._scheduler
        if scheduler.is_drained():
            if in_flight:
                return False
            num_held = self.forget_cache()
            text = f"Cache flushed; {num_held} sessions lost what they held." if num_held else "Cache flushed."
            self._reply(ControlReply(call_id=call_id, message=text))
            return True
        if scheduler.gate.timers.now < deadline:
            return False
        loads = scheduler.loads()
        text = f"Flush cache failed: {loads.num_running} requests run and {loads.num_waiting} wait."
        self._reply(ControlReply(call_id=call_id, success=False, message=text))
        return True
