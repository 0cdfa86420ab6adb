"""Calls on a thread of their own, left behind when they take too long."""

from __future__ import annotations

import threading
import time

import pytest

from banyan.managers.constrained import mask_filler
from banyan.managers.constrained.mask_filler import NO_LIMIT, MaskFiller


def test_results_come_in_order() -> None:
    filler = MaskFiller(NO_LIMIT)
    assert filler.run([]) == []
    for size in (1, 5, 50):
        assert filler.run([lambda value=value: value for value in range(size)]) == list(range(size))
    names = filler.run([lambda: threading.current_thread().name] * 3)
    assert set(names) == {"masks"}
    filler.close()
    filler.close()


def test_what_takes_too_long_is_none_and_the_rest_is_done() -> None:
    filler, gate = MaskFiller(0.1), threading.Event()

    def compute() -> None:
        while not gate.is_set():
            pass

    calls = [lambda: 1, compute, lambda: 3, compute, lambda: 5]
    assert filler.run(calls) == [1, None, 3, None, 5]
    gate.set()
    assert filler.run([lambda: 6]) == [6]
    filler.close()


def test_time_in_which_the_thread_does_not_run_is_not_counted() -> None:
    """On a machine that is busy with something else a cheap look takes as long as it must."""
    filler = MaskFiller(0.02)
    assert filler.run([lambda: time.sleep(0.2) or "late"]) == ["late"]
    filler.close()


def test_what_stands_still_is_left_behind_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_filler, "PATIENCE", 3)
    filler, gate = MaskFiller(0.05), threading.Event()
    assert filler.run([lambda: 1, gate.wait, lambda: 3]) == [1, None, 3]
    gate.set()
    filler.close()


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    filler = MaskFiller(NO_LIMIT)
    with pytest.raises(KeyError):
        filler.run([lambda: 1, lambda: {}["x"]])
    assert filler.run([lambda: 2]) == [2]
    filler.close()
