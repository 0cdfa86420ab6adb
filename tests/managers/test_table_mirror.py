"""The copy of req_to_token that a device has, under the real scheduler: an oracle that reads the copy says the right tokens only if
every cell that changed was sent."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
from harness import expected, prompt_of

from banyan.model_executor.table_mirror import TableMirror


class Watch:
    """Has the runner read a copy of the table, and compares it with the host's at each launch."""

    def __init__(self, harness: Any, *, counted: bool) -> None:
        runner, self.table = harness.runner, harness.memory.table.pool.table
        self.copy = np.zeros_like(self.table)
        self.mirror = TableMirror(self.table)
        self.packed: queue.Queue[Any] = queue.Queue()
        self.num_cells = self.num_tokens = 0
        self.counted = counted
        self.launch, self.run = runner.launch, runner._run
        runner._req_to_token = self.copy
        runner.launch, runner._run = self._launch, self._run

    def _launch(self, step: Any) -> Any:
        if not self.counted:
            step.rewrites = None
        changes = self.mirror.changes(step)
        self.packed.put(changes)
        for row, length in zip(step.rows, step.seq_lens, strict=True):
            assert np.array_equal(self.mirror._sent[row, :length], self.table[row, :length])
        self.num_cells += len(changes[0])
        self.num_tokens += len(step.input_ids)
        return self.launch(step)

    def _run(self, step: Any) -> Any:
        """On the runner's thread, in the order of steps, as a device takes the packed copy."""
        cells, values = self.packed.get_nowait()
        self.copy.reshape(-1)[cells] = values
        return self.run(step)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("faults", [{}, {"retract_every": 3}, {"retract_every": 2, "alloc_fail": 0.3}])
def test_a_copy_that_gets_what_changed_is_as_good_as_the_table(make: Any, faults: dict[str, float], counted: bool) -> None:
    harness = make(faults=faults, chunked_prefill_size=32, enable_mixed_chunk=counted)
    watch = Watch(harness, counted=counted)
    shared = prompt_of(99, 100)
    prompts = {f"r{i}": shared[: 20 * (i % 6)] + prompt_of(i, 25) for i in range(24)}  # three times as many as there are rows
    for i, (rid, prompt) in enumerate(prompts.items()):
        harness.submit(rid, prompt, max_new_tokens=12)
        harness.turn(i % 3)
        if i % 7 == 3:
            harness.abort(f"r{i - 2}")
    harness.drain()
    for rid, prompt in prompts.items():
        assert harness.ids.get(rid, []) == expected(prompt, 12)[: len(harness.ids.get(rid, []))]
    assert sum(len(ids) for ids in harness.ids.values()) > 150
    assert not faults or harness.scheduler.stats.num_retracted > 0
    assert watch.num_cells >= watch.num_tokens


def test_a_decode_step_brings_one_cell_for_each_request(make: Any) -> None:
    harness = make()
    watch = Watch(harness, counted=True)
    for i in range(4):
        harness.submit(f"r{i}", prompt_of(i, 50), max_new_tokens=40, ignore_eos=True)
    harness.turn(8)
    before = watch.num_cells, watch.num_tokens
    harness.turn(8)
    assert watch.num_cells - before[0] == watch.num_tokens - before[1] == 32
    harness.drain()
