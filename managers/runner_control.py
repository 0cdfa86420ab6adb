"""Control messages that the runner carries out: other weights, memory given back for a while, profiles.

Weights change between two steps and never under a request that runs: while an update waits, no request is admitted, and it is
carried out when none has a row any more, or during a pause. KV of other weights is never found: their version is part of its key.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from .cache_control import CacheControl
from .io_struct import (
    ContinueReq,
    ControlReply,
    FinishReason,
    MemoryReq,
    ProfileReq,
    ReadWeightReq,
    UpdateWeightsReq,
    WeightsGroupReq,
)
from .quiesce import Quiesce
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

UPDATED = FinishReason(kind="abort", message="Abort by an update of the weights.")
FAILURES = (ValueError, OSError, RuntimeError, MemoryError)  # of a runner; torch's out of memory is a RuntimeError


class RunnerControl:
    """``serve`` is called where Quiesce's is. weight_version: of what requests are computed with now."""

    def __init__(
        self,
        scheduler: Scheduler,
        reply: Callable[[ControlReply], None],
        quiesce: Quiesce,
        cache: CacheControl,
        weight_version: str,
    ) -> None:
        self.weight_version = weight_version
        self._scheduler = scheduler
        self._reply = reply
        self._quiesce = quiesce
        self._cache = cache
        self._updates: list[UpdateWeightsReq] = []
        self._joined: queue.SimpleQueue[ControlReply] = queue.SimpleQueue()  # answers that are ready
        self._released: set[str] = set()
        self._was_paused = False  # before memory was released

    def update(self, message: UpdateWeightsReq) -> None:
        """From now on no request is admitted; those that run may finish, unless all are to be aborted."""
        if self._released:
            self._answer(message.call_id, "Memory is released; resume it first.")
            return
        if message.abort_all:
            for rid in list(self._scheduler.live):
                self._scheduler.abort(rid, UPDATED)
        self._scheduler.gate.closed = True
        self._updates.append(message)

    def serve(self, *, in_flight: bool) -> None:
        """Do what can be done now. in_flight: a launched step is not absorbed yet."""
        scheduler = self._scheduler
        while not self._joined.empty():
            self._reply(self._joined.get())
        if not self._updates or in_flight or not (scheduler.gate.paused or self._nothing_is_seated()):
            return
        for message in self._updates:
            self._carry_out(message)
        self._updates.clear()
        scheduler.gate.closed = False

    def group(self, message: WeightsGroupReq) -> None:
        """Join a trainer's group beside the loop, which goes on meanwhile; or leave one."""
        if message.spec is None:
            self._joined.put(self._tried(message, lambda: self._scheduler.runner.leave_group(message.name)))
            return
        spec = message.spec
        join = partial(self._tried, message, lambda: self._scheduler.runner.join_group(spec))
        threading.Thread(target=lambda: self._joined.put(join()), name="join-group", daemon=True).start()

    def _tried(self, message: WeightsGroupReq, deed: Callable[[], None]) -> ControlReply:
        try:
            deed()
        except FAILURES as error:
            logger.warning("group %s: %s", message.name, error)
            text = str(error).splitlines()[0]
            return ControlReply(call_id=message.call_id, success=False, message=f"The group {message.name}: {text}")
        return ControlReply(call_id=message.call_id, message="Done.")

    def read(self, message: ReadWeightReq) -> None:
        """Tell the first values of a tensor."""
        try:
            values = self._scheduler.runner.read_weight(message.name, message.limit)
        except FAILURES as error:
            self._answer(message.call_id, str(error))
            return
        self._reply(ControlReply(call_id=message.call_id, state={"values": values}))

    def memory(self, message: MemoryReq) -> None:
        """Release or resume; while anything is released nothing is computed, and the pause cannot be ended."""
        tags = [tag for tag in message.tags if (tag in self._released) != message.release]
        scheduler = self._scheduler
        if message.release and not self._nothing_is_seated():
            self._answer(message.call_id, "Requests hold KV: wait until they end, or pause with the mode retract or abort first.")
            return
        try:
            if message.release:
                self._quiesce.forget_cache()
                scheduler.runner.release_memory(tags)
            else:
                scheduler.runner.resume_memory(tags)
        except FAILURES as error:
            logger.exception("memory could not be %s", "released" if message.release else "resumed")
            self._answer(message.call_id, f"{type(error).__name__}: {error}")
            return
        if message.release and not self._released:
            self._was_paused = scheduler.gate.paused
        self._released = self._released | set(tags) if message.release else self._released - set(tags)
        scheduler.gate.released = frozenset(self._released)
        scheduler.gate.paused = bool(self._released) or self._was_paused
        self._answer(message.call_id, "Done.", success=True)

    def resume(self, message: ContinueReq) -> None:
        """End a pause, unless memory is released."""
        if self._released:
            self._answer(message.call_id, "Memory is released; resume it first.")
        else:
            self._quiesce.resume(message)

    def profile(self, message: ProfileReq) -> None:
        """Start or stop a profile of the forward steps."""
        runner = self._scheduler.runner
        try:
            if message.spec is not None:
                runner.start_profile(message.spec)
                text = "Profile started."
            else:
                text = runner.stop_profile()
        except FAILURES as error:
            self._answer(message.call_id, str(error))
            return
        self._answer(message.call_id, text, success=True)

    def _carry_out(self, message: UpdateWeightsReq) -> None:
        scheduler = self._scheduler
        if message.flush_cache and not self._nothing_is_seated():
            self._answer(message.call_id, "Paused requests hold KV of the old weights; pause with mode retract, or do not flush.")
            return
        try:
            if message.path:
                with scheduler.stats.waiting():
                    self._load(message)
        except FAILURES as error:
            logger.exception("the weights were not updated")
            self._answer(message.call_id, f"The weights were not updated: {error}")
            return
        if message.flush_cache:
            self._quiesce.forget_cache()
        if message.weight_version is not None:
            self._set_version(message.weight_version)
        num_paused = len(scheduler.live) if scheduler.gate.paused else 0
        self._reply(ControlReply(call_id=message.call_id, message="Weights updated.", state={"num_paused_requests": num_paused}))

    def _load(self, message: UpdateWeightsReq) -> None:
        begin, runner, path = time.monotonic(), self._scheduler.runner, message.path
        if message.group:
            path = runner.receive_weights(message.group, message.tensors, path)
        runner.update_weights(path, message.load_format, partial=message.partial)
        source = "distributed" if message.group else "tensor" if message.partial else "disk"
        self._scheduler.stats.weight_loads[source] = time.monotonic() - begin

    def _set_version(self, version: str) -> None:
        """Requests that wait find the KV of the new version alone."""
        scheduler = self._scheduler
        self.weight_version = self._cache.weight_version = version
        for req in list(scheduler.waiting):
            scheduler.waiting.remove(req)
            req.key = req.key._replace(weight_version=version)
            scheduler.waiting.add(req)

    def _nothing_is_seated(self) -> bool:
        return len(self._scheduler.live) == len(self._scheduler.waiting)

    def _answer(self, call_id: int, text: str, *, success: bool = False) -> None:
        self._reply(ControlReply(call_id=call_id, success=success, message=text))
