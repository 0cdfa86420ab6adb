"""Calls into a loop that runs in a thread of its own."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from banyan.managers.errors import EngineDeadError
from banyan.managers.generation import UNSUPPORTED
from banyan.srt.engine import KNOWN, POSITIONAL, _request
from banyan.srt.loop_thread import LoopThread

DEADLINE = 20.0


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    raise ValueError("no")


async def hang(cancelled: threading.Event) -> None:
    try:
        await asyncio.sleep(DEADLINE)
    except asyncio.CancelledError:
        cancelled.set()
        raise


def test_results_and_errors_come_back(loop: LoopThread) -> None:
    assert loop.call(answer(3)) == 3
    with pytest.raises(ValueError, match="no"):
        loop.call(fail())

    async def body() -> None:
        assert await asyncio.gather(*[loop.call_async(answer(index)) for index in range(5)]) == list(range(5))
        with pytest.raises(ValueError, match="no"):
            await loop.call_async(fail())

    asyncio.run(body())


def test_cancelling_the_caller_cancels_the_call(loop: LoopThread) -> None:
    cancelled = threading.Event()

    async def body() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.call_async(hang(cancelled)), 0.05)

    asyncio.run(body())
    assert cancelled.wait(DEADLINE)


def test_a_result_that_comes_too_late_is_handed_back(loop: LoopThread) -> None:
    """The call has finished, but its caller was cancelled before it could see the result."""
    lost: list[int] = []
    seen = threading.Event()

    def take(value: int) -> None:
        lost.append(value)
        seen.set()

    async def body() -> None:
        task = asyncio.create_task(loop.call_async(answer(7), take))
        await asyncio.sleep(0)  # submitted
        loop.call(answer(0))  # and done, while this loop was blocked
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert seen.wait(DEADLINE)
    assert lost == [7]


def test_a_blocking_call_on_the_own_loop_is_an_error(loop: LoopThread) -> None:
    async def call_again() -> int:
        return loop.call(answer(1))

    with pytest.raises(RuntimeError, match="would never return"):
        loop.call(call_again())


def test_stop_cancels_what_runs_and_later_calls_raise() -> None:
    loop = LoopThread()
    cancelled = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            loop.call(hang(cancelled))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not loop.call(running()):
        pass
    loop.stop()
    loop.stop()
    thread.join(DEADLINE)
    assert cancelled.is_set()
    assert len(errors) == 1
    with pytest.raises(EngineDeadError):
        loop.call(answer(1))
    loop.post(lambda: pytest.fail("posted after stop"))


async def running() -> bool:
    return any(task.get_coro().__name__ == "hang" for task in asyncio.all_tasks())  # type: ignore[union-attr]


def test_positional_arguments_have_sglangs_places() -> None:
    more = [None] * len(POSITIONAL)
    request = _request("a", None, None, (*more[:15], True, *more[16:23], "my-rid"), {"priority": 3})
    assert (request.text, request.stream, request.rid, request.priority) == ("a", True, "my-rid", 3)
    assert set(UNSUPPORTED) <= KNOWN
    for named, message in (({"stream": True}, "twice"), ({"text": "b"}, "unexpected"), ({"nonsense": 1}, "unexpected")):
        with pytest.raises(TypeError, match=message):
            _request("a", None, None, tuple(more[:20]), named)
    with pytest.raises(TypeError, match="positional"):
        _request("a", None, None, (*more, None), {})


def test_a_stream_may_be_collected_while_a_call_is_submitted(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector runs wherever memory is allocated: also between taking the lock of the loop and releasing it."""

    class Dropped:
        def __del__(self) -> None:
            loop.post(seen.set)

    seen = threading.Event()
    submit = asyncio.run_coroutine_threadsafe

    def submit_after_collection(*args: Any) -> Any:
        cycle = [Dropped()]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        gc.collect()
        return submit(*args)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit_after_collection)
    caller = threading.Thread(target=lambda: loop.call(answer(3)), daemon=True)
    caller.start()
    caller.join(DEADLINE)
    assert not caller.is_alive()
    assert seen.wait(DEADLINE)
