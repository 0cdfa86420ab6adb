"""The forks of a state, as a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

from .interpreter import Interpreter
from .state import AsyncProgramState, BaseState, ProgramState

S = TypeVar("S", bound=BaseState)
MODES = ("gather_variable", "concate_and_append", "concatenate_and_append")


class _Group(Generic[S]):
    """``forks += x`` appends to each: a step, a list of one per fork, or a function of the fork's number."""

    def __init__(self, parent: BaseState, states: Sequence[S]) -> None:
        self.states = list(states)
        self._parent = parent

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> S:
        return self.states[index]

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __iadd__(self, other: Any) -> Self:
        if callable(other):
            values = [other(index) for index in range(len(self.states))]
        elif isinstance(other, (list, tuple)):
            values = list(other)
            if len(values) != len(self.states):
                raise ValueError(f"{len(values)} steps for {len(self.states)} forks")
        else:
            values = [other] * len(self.states)
        for state, value in zip(self.states, values, strict=True):
            state += value
        return self

    def _ended(self, mode: str) -> list[Interpreter]:
        if mode not in MODES:
            raise ValueError(f"join: mode must be one of {', '.join(MODES)}, got {mode!r}")
        inner = [state.interpreter for state in self.states]
        for each in inner:
            each.flush()
            each.close()
        return inner

    def _merge(self, inner: list[Interpreter], mode: str) -> None:
        for each in inner:
            each.queue.check()
        if mode == "gather_variable":
            self._parent.interpreter.gather(inner)
        else:
            self._parent.interpreter.concatenate(inner)


class Forks(_Group[ProgramState]):
    """Forks of a plain program; also a context manager that joins at its end."""

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all forks, then hand what they made to their parent.

        gather_variable: variables that the parent does not have become lists there, in the order of the forks.
        concate_and_append: what the forks have said since is appended to the parent's text, in their order.
        Raises the StepError of the first fork that failed; the parent itself goes on.
        """
        inner = self._ended(mode)
        for each in inner:
            each.signal.wait(each.is_idle)
        self._merge(inner, mode)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.join()


class AsyncForks(_Group[AsyncProgramState]):
    """Forks of an async program."""

    async def join(self, mode: str = "gather_variable") -> None:
        """As Forks.join."""
        inner = self._ended(mode)
        for each in inner:
            await each.signal.wait_async(each.is_idle)
        self._merge(inner, mode)

    async def __aenter__(self) -> AsyncForks:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.join()
