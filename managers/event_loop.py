"""The scheduler's two loops, side by side. One turn of either receives, decides, launches and absorbs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..model_executor.step import ModelInfo, StepHandle
from .schedule_batch import ScheduleBatch

LONG_STEP = {"cpu": 2}  # tokens from which a step is so long that overlap hides too little of the host's work, by device


class Verbs(Protocol):
    """What a loop does with a scheduler; see Scheduler."""

    def next_batch(self, *, in_flight: bool) -> ScheduleBatch | None:
        """The next step, or None."""

    def launch(self, batch: ScheduleBatch) -> StepHandle:
        """Start the step."""

    def absorb(self, batch: ScheduleBatch, handle: StepHandle) -> None:
        """Wait for the step and take its results in."""

    def give_up(self, batch: ScheduleBatch) -> None:
        """Tell a step under way if nobody waits for it any more. It is absorbed as ever."""


class EventLoop(Protocol):
    """receive(in_flight) takes messages in before each turn, and may sleep when there is nothing to do.

    in_flight: a step is launched and not absorbed.
    """

    def turn(self) -> None:
        """One turn."""


class NormalLoop:
    """Each step's results are taken in before the next step is decided."""

    def __init__(self, scheduler: Verbs, receive: Callable[[bool], None]) -> None:
        self._scheduler = scheduler
        self._receive = receive

    def turn(self) -> None:
        scheduler = self._scheduler
        self._receive(False)
        batch = scheduler.next_batch(in_flight=False)
        if batch:
            scheduler.absorb(batch, scheduler.launch(batch))


class OverlapLoop:
    """Step N is launched before the results of step N-1 are taken in, so that the host works while the device does.

    A request that arrives during step N-1 then waits for the whole of step N. Where a step takes long, that is more than the host's
    work can hide: the results of a step of ``long_step`` tokens or more are taken in before the next one is decided.

    When the results of step N-1 end all requests of step N, that step is given up.
    """

    def __init__(self, scheduler: Verbs, receive: Callable[[bool], None], *, long_step: int | None = None) -> None:
        self._scheduler = scheduler
        self._receive = receive
        self._long_step = long_step
        self._pending: tuple[ScheduleBatch, StepHandle] | None = None

    def turn(self) -> None:
        scheduler, pending = self._scheduler, self._pending
        self._receive(pending is not None)
        if pending and self._long_step is not None and len(pending[0].step.input_ids) >= self._long_step:
            self._pending = None
            scheduler.absorb(*pending)
            return  # what has come meanwhile is received before the next step is decided
        batch = scheduler.next_batch(in_flight=pending is not None)
        self._pending = (batch, scheduler.launch(batch)) if batch else None
        if pending:
            scheduler.absorb(*pending)
            if batch:
                scheduler.give_up(batch)


class PipelineLoop:
    """As many steps are under way as the model has stages; the oldest is absorbed when the next is launched.

    So the chunks of a long prompt follow each other through the stages, and the rows that decode form micro-batches: a row's next
    step is launched when its last token is known.
    """

    def __init__(self, scheduler: Verbs, receive: Callable[[bool], None], depth: int) -> None:
        self._scheduler = scheduler
        self._receive = receive
        self._depth = depth
        self._pending: deque[tuple[ScheduleBatch, StepHandle]] = deque()

    def turn(self) -> None:
        scheduler, pending = self._scheduler, self._pending
        self._receive(bool(pending))
        batch = scheduler.next_batch(in_flight=bool(pending))
        if batch:
            pending.append((batch, scheduler.launch(batch)))
        if pending and (batch is None or len(pending) == self._depth):
            scheduler.absorb(*pending.popleft())


def make_loop(scheduler: Verbs, receive: Callable[[bool], None], *, overlap: bool, model: ModelInfo) -> EventLoop:
    """The loop of a model: of its stages, and of the device that it is on."""
    if model.stages > 1:
        return PipelineLoop(scheduler, receive, model.stages)
    if not overlap:
        return NormalLoop(scheduler, receive)
    return OverlapLoop(scheduler, receive, long_step=LONG_STEP.get(model.device))
