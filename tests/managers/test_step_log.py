from __future__ import annotations

import logging

import pytest

from banyan.managers.stats import SchedulerStats
from banyan.managers.step_log import StepLog


@pytest.mark.parametrize("graph", [True, False])
def test_lines_say_whether_the_newest_result_was_replayed(graph, caplog):
    stats = SchedulerStats(log=StepLog(decode_log_interval=2))
    with caplog.at_level(logging.INFO, logger="banyan.managers.step_log"):
        stats.decode(num_reqs=3)
        stats.step(0.1, num_prefill_tokens=0, num_decode_rows=3, graph=graph)
        stats.step(0.1, num_prefill_tokens=7, num_decode_rows=1, graph=not graph)
        stats.decode(num_reqs=3)
        stats.prefill(num_reqs=1, num_new=7, num_cached=0)
    decode, prefill = caplog.messages
    assert decode.startswith("Decode batch, #running-req: 3, ") and f", cuda graph: {graph}, gen throughput" in decode
    assert f", cuda graph: {not graph}, input throughput" in prefill
