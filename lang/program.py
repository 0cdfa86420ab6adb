"""Function: a program, and the ways to run it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from .backend.base import Backend
from .backend.resolve import as_backend
from .batch import run_all
from .errors import NoBackendError, ProgramError, StepError
from .global_config import global_config
from .interpreter import Interpreter, Setting, running
from .ir import SamplingParams
from .requirements import Requirements
from .state import AsyncProgramState, BaseState, ProgramState
from .tracing import Placeholder, StopTracing, TraceState, trace, tracing
from .waiting import threads

logger = logging.getLogger(__name__)

DEFAULTS = SamplingParams(
    max_new_tokens=128,
    n=1,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    ignore_eos=False,
)
SAMPLING = {field.name for field in fields(SamplingParams)} - {"regex", "json_schema", "ebnf"}
MIN_PREFIX = 64  # characters of a shared prefix that are worth a call of their own
MIN_THREADS = 96

Item = Mapping[str, Any] | Sequence[Any]


class Function:
    """A program. Call it, or ``run`` it, with the function's arguments without ``s``; it returns the state it ended with."""

    def __init__(
        self, func: Callable[..., Any], num_api_spec_tokens: int | None = None, bind_arguments: Mapping[str, Any] | None = None
    ) -> None:
        names = list(inspect.signature(func).parameters)
        if not names or names[0] != "s":
            raise TypeError(f'{func.__qualname__}: The first argument must be "s"')
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments = dict(bind_arguments or {})
        self.arg_names = names[1:]
        self.is_async = inspect.iscoroutinefunction(func)
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__
        self._requirements: Requirements | None = None

    def bind(self, **kwargs: Any) -> Function:
        """The program with some arguments fixed; they win over those of a call."""
        unknown = [name for name in kwargs if name not in self.arg_names]
        if unknown:
            raise TypeError(f"{self.__name__} has no argument {unknown[0]!r}")
        return Function(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``run``; a coroutine for an async program. While another program is traced: a trace that ends here."""
        if tracing.get() is not None:
            raise StopTracing
        return self.run_async(*args, **kwargs) if self.is_async else self.run(*args, **kwargs)

    # --- one run ------------------------------------------------------------------------------------------------------------------

    def run(self, *args: Any, stream: bool = False, backend: Any = None, use_thread: bool = True, **kwargs: Any) -> Any:
        """Run it to its end and return the state; ``state.ret_value`` is what the function returned.

        Sampling options (all of gen's, but for grammars; max_new_tokens=128, temperature=1.0, seed ...) are the defaults of every
        gen. stream=True returns at once; read ``state.text_iter()``. use_thread=False makes each step wait for its call.
        Raises UnsupportedError before the first call if the backend cannot run it, StepError if a step fails, and whatever the
        function raises. An async program is run on an event loop of its own, in a thread.
        """
        options, kwargs = _split(kwargs)
        setting = self._setting(backend, options, stream=stream, use_thread=use_thread)
        if self.is_async:
            async_state = AsyncProgramState(Interpreter(setting))
            self._in_thread(lambda: asyncio.run(self._execute_async(async_state, args, kwargs)))
            return async_state if stream else self._wait(async_state)
        state = ProgramState(Interpreter(setting))
        if stream:
            self._in_thread(lambda: self._execute(state, args, kwargs))
        else:
            self._execute(state, args, kwargs)
        return state

    async def run_async(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> Any:
        """``run`` on the caller's event loop, for both kinds of programs; a plain program runs in a thread."""
        options, kwargs = _split(kwargs)
        setting = self._setting(backend, options, stream=stream, use_thread=True)
        if self.is_async and not stream:
            state = AsyncProgramState(Interpreter(setting))
            await self._execute_async(state, args, kwargs)
            return state
        started = self._start_async(setting, args, kwargs)
        return started if stream else await self._wait_async(started)

    def _start_async(self, setting: Setting, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A state whose program runs beside the caller: as a task if it is async, else in a thread."""
        if not self.is_async:
            state = ProgramState(Interpreter(setting))
            self._in_thread(lambda: self._execute(state, args, kwargs))
            return state
        async_state = AsyncProgramState(Interpreter(setting))
        work = self._execute_async(async_state, args, kwargs)
        async_state.task = asyncio.ensure_future(self._quietly(work))
        return async_state

    def _setting(self, backend: Any, options: Mapping[str, Any], *, stream: bool = False, use_thread: bool = True) -> Setting:
        """Raises UnsupportedError for what the backend cannot do, TypeError for an option that does not exist."""
        chosen = self._backend(backend)
        if self._requirements is None:
            self._requirements = Requirements(self.func)
        self._requirements.check(chosen)
        params = SamplingParams(**options).over(DEFAULTS)
        chosen.check_params(params)
        return Setting(
            program=self.__name__,
            backend=chosen,
            params=params,
            stream=stream,
            threaded=use_thread,
            num_spec_tokens=self.num_api_spec_tokens,
        )

    @staticmethod
    def _backend(backend: Any) -> Backend:
        outer = running.get()  # of a program that calls this one
        chosen = backend or (outer and outer.backend) or global_config.default_backend
        if chosen is None:
            raise NoBackendError
        return as_backend(chosen)

    def _execute(self, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        token = running.set(state.interpreter.setting)
        try:
            state.ret_value = self.func(state, *args, **{**kwargs, **self.bind_arguments})
            state.sync()
        except BaseException as error:  # Ctrl-C too: nothing more is sent, and whoever reads the state learns of it
            self._fail(state, error)
            raise
        finally:
            running.reset(token)
            state.end()
        _tell(state)

    async def _execute_async(self, state: AsyncProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        token = running.set(state.interpreter.setting)
        try:
            state.ret_value = await self.func(state, *args, **{**kwargs, **self.bind_arguments})
            await state.sync()
        except BaseException as error:  # as in _execute; cancellation too
            self._fail(state, error)
            raise
        finally:
            running.reset(token)
            state.end()
        _tell(state)

    @staticmethod
    def _in_thread(work: Callable[[], Any]) -> None:
        """What the program raises is the state's error by now."""

        def body() -> None:
            with contextlib.suppress(Exception):  # the top of a thread; the state has the error
                work()

        threads.start(body)

    @staticmethod
    async def _quietly(work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(Exception):  # the state has it
            await work

    def _fail(self, state: BaseState, error: BaseException) -> None:
        if not isinstance(error, StepError):
            wrapped = ProgramError(f"{self.__name__} ended with {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        state.interpreter.fail(error)

    @staticmethod
    def _wait(state: AsyncProgramState) -> AsyncProgramState:
        queue = state.interpreter.queue
        state.interpreter.signal.wait(lambda: queue.is_finished)
        _raise_own(queue.error)
        queue.check()
        return state

    @staticmethod
    async def _wait_async(state: ProgramState) -> ProgramState:
        queue = state.interpreter.queue
        await state.interpreter.signal.wait_async(lambda: queue.is_finished)
        _raise_own(queue.error)
        queue.check()
        return state

    # --- many runs ----------------------------------------------------------------------------------------------------------------

    def run_batch(
        self,
        batch_kwargs: Iterable[Item],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        stream: bool = False,
        use_thread: bool = True,
        **options: Any,
    ) -> list[Any] | Generator[Any]:
        """Run it once per item, a dict or a tuple of arguments, side by side; the states in the items' order.

        A run that fails does not end the others: its state's ``error()`` says why, and so does reading from it. num_threads bounds
        how many run at once; "auto" is 96, or 16 per core where that is more. Forks, and programs inside programs, have threads of
        their own, so they never wait for these. generator_style gives each state as soon as it and all before it are there. The
        text that all runs begin with is computed once, beforehand where the backend would compute it for each. options are run's.
        """
        items = [self._item(item) for item in batch_kwargs]
        setting = self._setting(backend, options, stream=stream, use_thread=use_thread)
        self._share(setting.backend, items)
        states = run_all(
            lambda index: self._run_quietly(setting, items[index]),
            len(items),
            num_threads=_num_threads(num_threads),
            progress_bar=progress_bar,
            bounded=generator_style,
        )
        return states if generator_style else list(states)

    async def run_batch_async(
        self, batch_kwargs: Iterable[Item], *, backend: Any = None, num_threads: int | str = "auto", **options: Any
    ) -> list[Any]:
        """``run_batch`` on the caller's event loop."""
        items = [self._item(item) for item in batch_kwargs]
        setting = self._setting(backend, options)
        await asyncio.to_thread(self._share, setting.backend, items)
        room = asyncio.Semaphore(_num_threads(num_threads))

        async def one(item: dict[str, Any]) -> Any:
            async with room:
                state = self._start_async(replace(setting), (), item)
                try:
                    with contextlib.suppress(Exception):  # it stays in the state
                        await self._wait_async(state)
                finally:
                    if state.task is not None:
                        state.task.cancel()  # does nothing to one that has ended
                return state

        return list(await asyncio.gather(*[one(item) for item in items]))

    def _run_quietly(self, setting: Setting, item: dict[str, Any]) -> Any:
        """Whatever a run raises stays in its state."""
        state: Any = (AsyncProgramState if self.is_async else ProgramState)(Interpreter(replace(setting)))
        with contextlib.suppress(Exception):
            if self.is_async:
                asyncio.run(self._execute_async(state, (), item))
            else:
                self._execute(state, (), item)
        return state

    def _share(self, backend: Backend, items: list[dict[str, Any]]) -> None:
        helps = backend.has_prefix_cache and not backend.shares_calls()
        if len(items) > 1 and helps and global_config.enable_precache_with_tracing:
            self._precache(backend, _shared(items))

    def _item(self, item: Item) -> dict[str, Any]:
        if isinstance(item, Mapping):
            return dict(item)
        names = [name for name in self.arg_names if name not in self.bind_arguments]
        if len(item) > len(names):
            raise TypeError(f"{self.__name__} takes {len(names)} arguments, an item has {len(item)}")
        return dict(zip(names, item, strict=False))

    # --- traces -------------------------------------------------------------------------------------------------------------------

    def trace(self, *, backend: Any = None, **kwargs: Any) -> TraceState:
        """The program's steps, found by running its function with placeholders for the arguments that are not given.

        The function's own code runs, but nothing is sent. A trace ends where the function looks at a placeholder other than by
        writing it into text.
        """
        return trace(self.func, self._dummies(kwargs))

    def cache(self, backend: Any = None, **kwargs: Any) -> str:
        """Have the text that all runs begin with in the backend's cache; the text, "" if it is too short to matter."""
        return self._precache(self._backend(backend), kwargs)

    def _precache(self, backend: Backend, known: Mapping[str, Any]) -> str:
        try:
            state = trace(self.func, self._dummies(known), prefix_only=True)
            prefix = state.prefix(backend.get_chat_template)
        except Exception:  # a user's function, given placeholders, may raise anything; its real runs will tell
            logger.debug("%s: the prefix could not be traced", self.__name__, exc_info=True)
            return ""
        if len(prefix) <= MIN_PREFIX:
            return ""
        backend.cache_prefix(prefix)
        return prefix

    def _dummies(self, known: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self.func).parameters
        positional = [
            name
            for name in self.arg_names
            if parameters[name].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
        values = {name: Placeholder(name) for name in positional}
        return {**values, **{name: value for name, value in known.items() if name in values}, **self.bind_arguments}


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sampling options, arguments of the program)"""
    options = {name: value for name, value in kwargs.items() if name in SAMPLING}
    return options, {name: value for name, value in kwargs.items() if name not in SAMPLING}


def _shared(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments that are the same plain value in all items."""
    plain = {name: value for name, value in items[0].items() if isinstance(value, (str, int, float, bool))}
    return {name: value for name, value in plain.items() if all(item.get(name) == value for item in items)}


def _raise_own(error: Exception | None) -> None:
    """What the function itself raised comes out of run as it is."""
    if isinstance(error, ProgramError) and isinstance(error.__cause__, Exception):
        raise error.__cause__


def _num_threads(num_threads: int | str) -> int:
    if num_threads == "auto":
        return max(MIN_THREADS, 16 * (os.cpu_count() or 1))
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ValueError(f'num_threads must be "auto" or at least 1, got {num_threads!r}')
    return num_threads


def _tell(state: BaseState) -> None:
    if global_config.verbosity >= 2:
        print(state.show().to_text(), file=sys.stderr)
    elif global_config.verbosity:
        print(state.interpreter.transcript.text, file=sys.stderr)
