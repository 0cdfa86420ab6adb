"""Running a program without a backend, with placeholders for what is not known: its steps, and the text that all its runs share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from . import ir
from .chat_template import ChatTemplate
from .transcript import Transcript

OPEN, CLOSE = "\ue0f0", "\ue0f1"  # around a placeholder's name, in text; private characters that no prompt has


class StopTracing(BaseException):
    """The program asks for something that only a real run knows. No Exception, so that a program does not catch it."""


class Placeholder(ir.Text):
    """Stands for an argument or a variable. It may be written into text; any other use ends the trace."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{OPEN}{name}{CLOSE}")

    def __str__(self) -> str:
        return self.value

    def __format__(self, _: str) -> str:
        return self.value

    def __add__(self, other: Any) -> Any:
        return self.value + other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other + self.value if isinstance(other, str) else super().__radd__(other)

    def __await__(self) -> Generator[None, None, Placeholder]:
        yield from ()
        return self

    def _stop(self, *_: Any, **__: Any) -> NoReturn:
        raise StopTracing

    __iter__ = __len__ = __bool__ = __getitem__ = __call__ = __contains__ = _stop
    __int__ = __float__ = __index__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = _stop
    __sub__ = __mul__ = __truediv__ = __mod__ = _stop
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StopTracing


@dataclass(frozen=True)
class ForkNode(ir.Expr):
    """A fork and the steps of each of its states."""

    states: tuple[TraceState, ...]


class TraceState:
    """The ``s`` of a traced program. nodes: its steps. complete: the program came to its end. prefix_only: the first step whose
    text is not known ends the trace."""

    def __init__(self, *, prefix_only: bool = False) -> None:
        self.nodes: list[ir.Expr] = []
        self.complete = False
        self.ret_value: Any = None
        self._prefix_only = prefix_only
        self._variables: set[str] = set()

    def __iadd__(self, other: object) -> TraceState:
        for part in ir.parts_of(other):
            constant = isinstance(part, (ir.RoleBegin, ir.RoleEnd, ir.ScopeBegin, ir.ScopeEnd))
            constant = constant or (isinstance(part, ir.Text) and OPEN not in part.value)
            self.nodes.append(part)
            if isinstance(part, (ir.Gen, ir.Select, ir.ScopeBegin)) and part.name is not None:
                self._variables.add(part.name)
            if self._prefix_only and not constant:
                raise StopTracing
        return self

    def _turn(self, role: ir.Role, expr: object) -> contextlib.AbstractContextManager[None]:
        if expr is None:
            return self._around(ir.RoleBegin(role), ir.RoleEnd(role))
        self += [ir.RoleBegin(role)]
        self += expr
        self += [ir.RoleEnd(role)]
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _around(self, begin: ir.Expr, end: ir.Expr) -> Iterator[None]:
        self += begin
        yield
        self += end

    def system(self, expr: object = None) -> Any:
        """As on a ProgramState, like all that follow."""
        return self._turn("system", expr)

    def user(self, expr: object = None) -> Any:
        """A turn."""
        return self._turn("user", expr)

    def assistant(self, expr: object = None) -> Any:
        """A turn."""
        return self._turn("assistant", expr)

    def var_scope(self, name: str) -> Any:
        """Text into a variable."""
        return self._around(ir.ScopeBegin(name), ir.ScopeEnd(name))

    def __getitem__(self, name: str) -> Placeholder:
        return self.get_var(name)

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def __setitem__(self, name: str, _: Any) -> None:
        self._variables.add(name)

    set_var = __setitem__

    def get_var(self, name: str) -> Placeholder:
        """A placeholder."""
        if self._prefix_only:
            raise StopTracing
        return Placeholder(name)

    def get_meta_info(self, name: str) -> Placeholder:
        """A placeholder."""
        return self.get_var(f"meta_info of {name}")

    def text(self) -> Placeholder:
        """A placeholder."""
        return self.get_var("text")

    def messages(self) -> Placeholder:
        """A placeholder."""
        return self.get_var("messages")

    def sync(self) -> Placeholder:
        """Nothing to wait for."""
        return Placeholder("sync")

    def error(self) -> None:
        """Nothing failed."""

    def text_iter(self, _: str | None = None) -> NoReturn:
        """Needs a real run."""
        raise StopTracing

    text_async_iter = text_iter

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> TraceForks:
        """A fork is a step of its own."""
        if self._prefix_only:
            raise StopTracing
        node = ForkNode(tuple(TraceState() for _ in range(size)))
        self.nodes.append(node)
        return TraceForks(node.states)

    def copy(self, position_ids_offset: Any = None) -> TraceForks:
        """As a context manager: one fork."""
        return self.fork(1)

    def prefix(self, template: Callable[[], ChatTemplate]) -> str:
        """The text up to the first step that is not known."""
        transcript = Transcript(template)
        for node in self.nodes:
            if isinstance(node, ir.Text):
                known, unknown, _ = node.value.partition(OPEN)
                transcript.append(known)
                if unknown:
                    break
            elif isinstance(node, ir.RoleBegin):
                transcript.begin(node.role)
            elif isinstance(node, ir.RoleEnd):
                transcript.end(node.role)
            elif not isinstance(node, (ir.ScopeBegin, ir.ScopeEnd)):
                break
        return transcript.text


class TraceForks:
    """Forks of a traced program, plain or async."""

    def __init__(self, states: tuple[TraceState, ...]) -> None:
        self.states = list(states)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> TraceState:
        return self.states[index]

    def __iadd__(self, other: Any) -> TraceForks:
        for index, state in enumerate(self.states):
            state += other(index) if callable(other) else other[index] if isinstance(other, (list, tuple)) else other
        return self

    def join(self, mode: str = "gather_variable") -> Placeholder:
        """Nothing to wait for."""
        return Placeholder("join")

    def __enter__(self) -> Any:
        return self.states[0] if len(self.states) == 1 else self

    def __exit__(self, *_: object) -> None:
        pass

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        pass


tracing: ContextVar[TraceState | None] = ContextVar("tracing", default=None)


def trace(function: Callable[..., Any], kwargs: Mapping[str, Any], *, prefix_only: bool = False) -> TraceState:
    """Run a program's function with a TraceState. An async one that waits for something else ends there."""
    state = TraceState(prefix_only=prefix_only)
    token = tracing.set(state)
    try:
        result = function(state, **kwargs)
        if isinstance(result, Coroutine):
            result = _drive(result)
        state.ret_value = result
        state.complete = True
    except StopTracing:
        pass
    finally:
        tracing.reset(token)
    return state


def _drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    finally:
        coroutine.close()
    raise StopTracing
