"""ProgramState: the ``s`` of a program. AsyncProgramState: the ``s`` of an ``async def`` program.

Writing never waits: ``s += ...``, the roles and ``fork`` hand steps over and return. Reading waits for the steps it depends on;
in an async program every reading method, ``s["name"]`` too, gives something to await.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Self

from . import ir
from .backend.base import Backend
from .errors import ProgramError
from .interpreter import Interpreter
from .show import Picture

if TYPE_CHECKING:
    from .group import AsyncForks, Forks


class BaseState:
    """What both kinds share: everything that writes."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.ret_value: Any = None
        self.task: Any = None  # the asyncio task that runs a streaming async program

    @property
    def interpreter(self) -> Interpreter:
        """What performs the steps."""
        return self._interpreter

    @property
    def backend(self) -> Backend:
        """What the calls go to."""
        return self._interpreter.setting.backend

    def __iadd__(self, other: object) -> Self:
        """Append a string, a step or a list of them."""
        self._interpreter.submit(other)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable, after the steps that came before."""
        self._interpreter.set(name, value)

    def system(self, expr: object = None) -> contextlib.AbstractContextManager[None]:
        """``s.system(expr)`` appends a turn, ``with s.system():`` opens one."""
        return self._turn("system", expr)

    def user(self, expr: object = None) -> contextlib.AbstractContextManager[None]:
        """``s.user(expr)`` appends a turn, ``with s.user():`` opens one."""
        return self._turn("user", expr)

    def assistant(self, expr: object = None) -> contextlib.AbstractContextManager[None]:
        """``s.assistant(expr)`` appends a turn, ``with s.assistant():`` opens one."""
        return self._turn("assistant", expr)

    def _turn(self, role: ir.Role, expr: object) -> contextlib.AbstractContextManager[None]:
        if expr is None:
            return self._around(ir.RoleBegin(role), ir.RoleEnd(role))
        self._interpreter.submit([ir.RoleBegin(role), expr, ir.RoleEnd(role)])
        return contextlib.nullcontext()

    def var_scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        """``with s.var_scope(name):`` all text that is added inside goes into a variable too."""
        return self._around(ir.ScopeBegin(name), ir.ScopeEnd(name))

    @contextlib.contextmanager
    def _around(self, begin: ir.Expr, end: ir.Expr) -> Iterator[None]:
        self._interpreter.submit(begin)
        yield
        self._interpreter.submit(end)

    def __contains__(self, name: str) -> bool:
        """Whether a step that was submitted writes it. Does not wait."""
        return self._interpreter.knows(name)

    def error(self) -> Exception | None:
        """What ended this state too early, so far. Does not wait in an async program."""
        return self._interpreter.queue.error

    def cancel(self) -> None:
        """End the state and its forks: streams are left, which aborts them on the server, and nothing more is sent."""
        self._interpreter.fail(ProgramError(f"{self._interpreter.setting.program} was cancelled"))

    def end(self) -> None:
        """No more steps will come. ``run`` calls it."""
        self._interpreter.close()

    # --- reading, common parts --------------------------------------------------------------------------------------------------

    def _variable(self, name: str) -> Callable[[], bool]:
        self._interpreter.flush()
        return lambda: self._interpreter.is_complete(name)

    def _idle(self) -> bool:
        return self._interpreter.is_idle()

    def _progress(self, name: str | None) -> tuple[str, bool]:
        """(text so far, whether it is all); the signal is held."""
        inner = self._interpreter
        if name is None:
            return inner.transcript.text, inner.queue.is_finished
        value = inner.variables.get(name, "")
        value = value[0] if isinstance(value, list) and value else value
        return str(value), inner.is_complete(name)

    def _new_text(self, name: str | None, seen: int) -> tuple[str, bool]:
        text, done = self._progress(name)
        return text[seen:], done

    def _end_of_text(self, name: str | None) -> None:
        """Raise what ended it, or that there is no such variable."""
        if name is None:
            self._interpreter.queue.check()
        else:
            self._interpreter.value(name)

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """The text, or a variable's, in pieces as they come; with return_meta_data pairs of a piece and its meta_info."""
        inner = self._interpreter
        seen, done = 0, False
        while not done:
            await inner.signal.wait_async(lambda: any(self._new_text(var_name, seen)))  # noqa: B023  read at once
            with inner.signal:
                new, done = self._new_text(var_name, seen)
                meta = inner.meta_info.get(var_name, {}) if var_name else {}
            seen += len(new)
            if new:
                yield (new, meta) if return_meta_data else new
        self._end_of_text(var_name)

    def show(self, path: str | None = None) -> Picture:
        """What the program did so far: ``.json``, ``.html``; written to a path that ends with .json or .html if one is given."""
        picture = Picture.of(self._interpreter)
        if path is not None:
            picture.save(path)
        return picture


class ProgramState(BaseState):
    """The state of a plain program."""

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """A variable, once it has been written. Raises the StepError that kept it from being written, or VariableError."""
        self._interpreter.signal.wait(self._variable(name))
        return self._interpreter.value(name)

    def get_meta_info(self, name: str) -> Any:
        """The backend's meta_info of the gen or select that wrote it."""
        self._interpreter.signal.wait(self._variable(name))
        return self._interpreter.meta(name)

    def text(self) -> str:
        """All text so far, when every step before is done."""
        self.sync()
        return self._interpreter.transcript.text

    def messages(self) -> list[dict[str, Any]]:
        """The closed turns as OpenAI messages."""
        self.sync()
        return list(self._interpreter.transcript.messages)

    def sync(self) -> None:
        """Wait for all steps before. Raises StepError."""
        self._interpreter.flush()
        self._interpreter.signal.wait(self._idle)
        self._interpreter.queue.check()

    def error(self) -> Exception | None:
        """What ended this state too early; waits for all steps before."""
        self._interpreter.signal.wait(self._idle)
        return self._interpreter.queue.error

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or a variable's, in pieces as they come. Raises StepError after the last piece of a program that failed."""
        inner = self._interpreter
        seen, done = 0, False
        while not done:
            inner.signal.wait(lambda: any(self._new_text(var_name, seen)))  # noqa: B023  read at once
            with inner.signal:
                new, done = self._new_text(var_name, seen)
            seen += len(new)
            if new:
                yield new
        self._end_of_text(var_name)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> Forks:
        """States that go on from here, side by side. position_ids_offset has no effect, as with every server of SGLang's."""
        from .group import Forks

        return Forks(self, [ProgramState(each) for each in self._interpreter.fork(_size(size))])

    @contextlib.contextmanager
    def copy(self, position_ids_offset: list[int] | None = None) -> Iterator[ProgramState]:
        """``with s.copy() as c:`` one fork, joined at the end."""
        forks = self.fork(1)
        yield forks[0]
        forks.join()


class AsyncProgramState(BaseState):
    """The state of an ``async def`` program."""

    def __getitem__(self, name: str) -> Coroutine[Any, Any, Any]:
        return self.get_var(name)

    async def get_var(self, name: str) -> Any:
        """As ProgramState.get_var."""
        await self._interpreter.signal.wait_async(self._variable(name))
        return self._interpreter.value(name)

    async def get_meta_info(self, name: str) -> Any:
        """As ProgramState.get_meta_info."""
        await self._interpreter.signal.wait_async(self._variable(name))
        return self._interpreter.meta(name)

    async def text(self) -> str:
        """As ProgramState.text."""
        await self.sync()
        return self._interpreter.transcript.text

    async def messages(self) -> list[dict[str, Any]]:
        """As ProgramState.messages."""
        await self.sync()
        return list(self._interpreter.transcript.messages)

    async def sync(self) -> None:
        """As ProgramState.sync."""
        self._interpreter.flush()
        await self._interpreter.signal.wait_async(self._idle)
        self._interpreter.queue.check()

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> AsyncForks:
        """As ProgramState.fork."""
        from .group import AsyncForks

        return AsyncForks(self, [AsyncProgramState(each) for each in self._interpreter.fork(_size(size))])

    @contextlib.asynccontextmanager
    async def copy(self, position_ids_offset: list[int] | None = None) -> AsyncIterator[AsyncProgramState]:
        """``async with s.copy() as c:``"""
        forks = self.fork(1)
        yield forks[0]
        await forks.join()


def _size(size: int) -> int:
    if size < 1:
        raise ValueError(f"fork: size must be at least 1, got {size}")
    return size
