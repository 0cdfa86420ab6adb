"""The steps of one state, performed in the order of their submission."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .errors import StepError
from .waiting import Signal, threads


@dataclass(frozen=True)
class Step:
    """perform does it; quick: it never waits for a call; dropped is told the error that kept it from being performed."""

    label: str
    perform: Callable[[], None]
    quick: bool = False
    dropped: Callable[[Exception], None] | None = None


class StepQueue:
    """Steps run on a thread while there are any; quick ones run at once in the caller where nothing is ahead of them.

    After a step has failed nothing more is performed: ``error`` is set and every submit raises it. A held queue waits for
    ``release`` (a fork whose parent is not there yet). threaded=False performs each step in submit.
    """

    def __init__(self, program: str, signal: Signal, *, threaded: bool, held: bool = False) -> None:
        self.error: Exception | None = None
        self.closed = False
        self._program = program
        self._signal = signal
        self._threaded = threaded
        self._held = held
        self._busy = False
        self._steps: deque[Step] = deque()

    @property
    def is_idle(self) -> bool:
        """All that was submitted is done. Look at it with the signal held."""
        return self.error is not None or not (self._busy or self._steps or self._held)

    @property
    def is_finished(self) -> bool:
        """Idle for good."""
        return self.error is not None or (self.closed and self.is_idle)

    def submit(self, step: Step) -> None:
        """Take a step. Raises the error of an earlier step, also of this one where it runs at once."""
        with self._signal:
            self.check()
            direct = (step.quick or not self._threaded) and self.is_idle
            if not direct:
                self._steps.append(step)
            start = not (direct or self._busy or self._held)
            self._busy = self._busy or direct or start
        if start:
            threads.start(self._drain)
        elif direct:
            self._perform(step)
            self._pass_on()
            self.check()

    def release(self) -> None:
        """Let a held queue go."""
        with self._signal:
            self._held = False
            start = bool(self._steps) and not self._busy and self.error is None
            self._busy = self._busy or start
        if start and self._threaded:
            threads.start(self._drain)
        elif start:
            self._drain()
        else:
            self._signal.notify()

    def close(self) -> None:
        """No more steps will come."""
        with self._signal:
            self.closed = True
        self._signal.notify()

    def fail(self, error: Exception) -> None:
        """End with this error; what has not been performed is dropped."""
        with self._signal:
            if self.error is not None:
                return
            self.error = error
            dropped = list(self._steps)
            self._steps.clear()
        for step in dropped:
            if step.dropped is not None:
                step.dropped(error)
        self._signal.notify()

    def check(self) -> None:
        """Raise the error if there is one: a fresh copy of it, since several threads may."""
        error = self.error
        if isinstance(error, StepError):
            raise StepError(error.step, error.program, error.__cause__ or error) from error.__cause__
        if error is not None:
            raise error

    def _pass_on(self) -> None:
        """After a direct step: what was submitted meanwhile goes to a thread."""
        with self._signal:
            start = bool(self._steps) and self.error is None
            self._busy = start
        if start and self._threaded:
            threads.start(self._drain)
        elif start:
            self._drain()
        self._signal.notify()

    def _drain(self) -> None:
        while True:
            with self._signal:
                if self.error is not None or not self._steps:
                    self._busy = False
                    break
                step = self._steps.popleft()
            self._perform(step)
        self._signal.notify()

    def _perform(self, step: Step) -> None:
        try:
            step.perform()
        except StepError as error:  # of another state
            self.fail(error)
        except Exception as error:  # the top of a thread: whatever a step raises belongs to the program
            failure = StepError(step.label, self._program, error)
            failure.__cause__ = error
            self.fail(failure)
