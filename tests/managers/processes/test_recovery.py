"""After a burst of retractions the scheduler fills its batches again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Harness
from server import oracle_folder

from banyan.managers.faults import Faults
from banyan.model_executor.step import ForwardMode

RETRACTIONS = 8


def mean_batch_size(folder: str, *, overlap: bool, burst: bool) -> float:
    """Of the decode steps of the last third of a steady run, less the end when the queue is empty. The pool holds about half of
    the rows, so that the reserve for running requests decides whom to admit."""
    harness = Harness(folder, overlap=overlap, page_size=1, total=600, max_running_requests=16)
    sizes: list[int] = []
    launch = harness.scheduler.launch

    def watched(batch: Any) -> Any:
        if batch.step.mode is ForwardMode.DECODE:
            sizes.append(len(batch.rows))
        return launch(batch)

    harness.scheduler.launch = watched  # type: ignore[method-assign]
    for index in range(120):
        harness.submit(f"r{index}", [3 + index] * 10, max_new_tokens=60, ignore_eos=True)
    harness.turn(60)
    before = harness.scheduler.stats.num_retracted
    while burst and harness.scheduler.stats.num_retracted < before + RETRACTIONS:
        harness.scheduler.faults = Faults({"retract_every": 1})
        harness.turn()
    harness.scheduler.faults = Faults()
    harness.drain()
    harness.close()
    assert len(harness.ids) == 120
    last = sizes[-len(sizes) // 3 : -60]
    return sum(last) / len(last)


@pytest.mark.parametrize("overlap", [True, False])
def test_batches_are_as_big_again(tmp_path: Path, overlap: bool) -> None:
    folder = oracle_folder(tmp_path / "model")
    calm, shaken = (mean_batch_size(folder, overlap=overlap, burst=burst) for burst in (False, True))
    assert calm > 7
    assert shaken > 0.8 * calm
