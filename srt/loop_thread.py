"""An asyncio loop in a daemon thread, and calls into it from plain code and from other loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..managers.errors import EngineDeadError
from ..managers.generation import GenerateInput, Generation
from ..managers.tokenizer_manager import TokenizerManager

T = TypeVar("T")


class LoopThread:
    """The loop runs from construction until ``stop``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # No call is submitted after stop. Reentrant: the collector may drop a Stream, which posts, while this thread holds it.
        self._lock = threading.RLock()
        self.stopped = False
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="banyan-loop", daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself, for what schedules on it from other threads."""
        return self._loop

    def call(self, coroutine: Coroutine[Any, Any, T], lost: Callable[[T], None] | None = None) -> T:
        """Run a coroutine on the loop and wait for its result. An exception here, like Ctrl-C, cancels it.

        ``lost`` is called on the loop with a result that came too late to be returned. Raises EngineDeadError after stop.
        """
        future = self._submit(coroutine)
        try:
            return future.result()
        except BaseException:
            self._abandon(future, lost)
            raise

    async def call_async(self, coroutine: Coroutine[Any, Any, T], lost: Callable[[T], None] | None = None) -> T:
        """``call`` for a coroutine on another loop; cancelling the caller cancels the call."""
        future = self._submit(coroutine)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:
            self._abandon(future, lost)
            raise

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the loop soon; nothing after stop."""
        with self._lock:
            if not self.stopped:
                self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel what still runs and end the thread. Idempotent."""
        with self._lock:
            if not self.stopped:
                self.stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self.stopped:
                coroutine.close()
                raise EngineDeadError("the engine was shut down")
            if threading.current_thread() is self._thread:
                coroutine.close()
                raise RuntimeError("a blocking call on the engine's own loop would never return")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _abandon(self, future: Future[T], lost: Callable[[T], None] | None) -> None:
        future.cancel()
        if lost is not None:
            future.add_done_callback(lambda done: self._hand_back(done, lost))

    def _hand_back(self, future: Future[T], lost: Callable[[T], None]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.post(lambda: lost(future.result()))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


class Stream:
    """Chunks of one request, for ``for`` and for ``async for`` on any loop. Closing or dropping it aborts what has not finished."""

    def __init__(self, thread: LoopThread, tm: TokenizerManager, generation: Generation, request: GenerateInput) -> None:
        self._thread = thread
        self._generation = generation
        self._chunks = tm.stream(generation, request)
        self._closed = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> dict[str, Any]:
        chunk = None if self._closed else self._thread.call(self._next())
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> dict[str, Any]:
        chunk = None if self._closed else await self._thread.call_async(self._next())
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def _next(self) -> dict[str, Any] | None:
        return await anext(self._chunks, None)

    def close(self) -> None:
        """Abort what has not finished. Idempotent."""
        self._closed = True
        self._thread.post(self._generation.abort)

    async def aclose(self) -> None:
        """``close`` under the name that contextlib.aclosing calls."""
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # never constructed
            self.close()
