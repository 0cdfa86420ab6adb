"""Life: whether the engine's processes live, are being started again, or are dead for good; and the errors that say so."""

from __future__ import annotations

import asyncio

from ..errors import EngineDeadError, EngineRestartError


class Life:
    """The tokenizer manager's. ``error`` stays once it is set; ``restarting`` lasts from a death until new processes are ready."""

    def __init__(self) -> None:
        self.error: EngineDeadError | None = None
        self.restarting = False
        self._back = asyncio.Event()
        self._back.set()

    def end(self, error: EngineDeadError) -> None:
        """Dead for good; the first error stays. Safe on any thread."""
        if self.error is None:
            self.error = error

    def suspend(self) -> None:
        """The processes died and will be started again."""
        self.restarting = True
        self._back.clear()

    def resume(self) -> None:
        """They are back, or will never be."""
        self.restarting = False
        self._back.set()

    async def wait(self) -> None:
        """Until nothing is being started again."""
        await self._back.wait()

    def new_error(self) -> EngineDeadError:
        """One exception object per waiter: raising one from several tasks would mix their tracebacks."""
        if self.error is None and self.restarting:
            return EngineRestartError()
        error = self.error or EngineDeadError("the engine died")
        return EngineDeadError(str(error), error.detail)

    def check(self) -> None:
        """Raises EngineDeadError if nothing can be asked of the processes now."""
        if self.error is not None or self.restarting:
            raise self.new_error()
