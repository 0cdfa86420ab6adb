"""Threads that may wait for each other, and signals across threads and loops."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from banyan.lang.errors import StepError
from banyan.lang.step_queue import Step, StepQueue
from banyan.lang.waiting import Signal, Threads


def test_tasks_that_wait_for_each_other_all_run() -> None:
    pool = Threads()
    barrier = threading.Barrier(40)
    for _ in range(39):
        pool.start(barrier.wait)  # type: ignore[arg-type]
    barrier.wait(20)


def test_warm_threads_are_reused_and_idle_ones_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(Threads, "IDLE_SECONDS", 0.2)
    pool = Threads()
    seen: set[threading.Thread] = set()
    for _ in range(20):
        done = threading.Event()

        def task(done: threading.Event = done) -> None:
            seen.add(threading.current_thread())
            done.set()

        pool.start(task)
        assert done.wait(10)
        time.sleep(0.005)
    assert len(seen) < 20
    for thread in seen:
        thread.join(10)
        assert not thread.is_alive()


def test_a_signal_wakes_coroutines_of_any_loop() -> None:
    signal = Signal()
    state = {"on": False}

    async def wait() -> str:
        await signal.wait_async(lambda: state["on"])
        return "woken"

    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(wait()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    with signal:
        state["on"] = True
    signal.notify()
    for thread in threads:
        thread.join(10)
    assert answers == ["woken"] * 3
    assert not signal._wakers


def test_steps_run_in_order_and_quick_ones_at_once() -> None:
    signal = Signal()
    queue = StepQueue("p", signal, threaded=True)
    done: list[int] = []
    gate = threading.Event()
    queue.submit(Step("0", lambda: done.append(0), quick=True))
    assert done == [0]
    queue.submit(Step("1", lambda: (gate.wait(10), done.append(1))[1]))
    for number in range(2, 50):
        queue.submit(Step(str(number), lambda number=number: done.append(number), quick=number % 2 == 0))  # type: ignore[misc]
    assert done == [0]
    gate.set()
    signal.wait(lambda: queue.is_idle)
    assert done == list(range(50))


def test_what_comes_after_a_failure_is_dropped() -> None:
    signal = Signal()
    queue = StepQueue("p", signal, threaded=True, held=True)
    dropped: list[Exception] = []

    def fail() -> None:
        raise ValueError("odd")

    queue.submit(Step("bad", fail))
    queue.submit(Step("later", lambda: dropped.clear(), dropped=dropped.append))
    assert not queue.is_idle
    queue.release()
    signal.wait(lambda: queue.is_idle)
    assert len(dropped) == 1
    with pytest.raises(StepError, match="p, step bad: odd") as caught:
        queue.check()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(StepError):
        queue.submit(Step("more", lambda: None))
