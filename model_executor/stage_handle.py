"""Handles of steps: what a step leaves on the side, and results that another stage computes."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.parallel import RankLostError, Receipt
from .step import FatalStepError, StepHandle, StepOutput


@dataclass(slots=True)
class ResultBox:
    """Where a step leaves whether it was replayed, and a stage's step what it expects from the last stage."""

    receipt: Receipt | None = None
    graph: bool = False
    given_up: bool = False


class BoxHandle:
    """A StepHandle whose output takes over what the step left in the box."""

    def __init__(self, own: StepHandle, box: ResultBox) -> None:
        self._own, self._box = own, box

    def done(self) -> bool:
        """As StepHandle.done."""
        return self._own.done()

    def wait(self) -> StepOutput:
        """As StepHandle.wait."""
        output = self._own.wait()
        output.graph, output.given_up = self._box.graph, self._box.given_up
        return output


class StageHandle:
    """A StepHandle: its own part of the step first, then the result from the last stage."""

    def __init__(self, own: StepHandle, box: ResultBox) -> None:
        self._own, self._box = own, box

    def done(self) -> bool:
        """True once the own part is over; the result may be on its way still."""
        return self._own.done()

    def wait(self) -> StepOutput:
        output = self._own.wait()
        if self._box.receipt is None:
            raise FatalStepError("a stage expects no result of its step")
        try:
            result = StepOutput.of([tensor.numpy() for tensor in self._box.receipt.wait()])
        except RankLostError as error:
            raise FatalStepError(str(error)) from error
        result.elapsed, result.graph = output.elapsed, self._box.graph
        return result
