"""What a scheduler reports, the warning of a queue that does not move, and probes that leave nothing behind."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from harness import Harness, prompt_of

from banyan.managers.io_struct import SchedulerReport
from banyan.managers.log_limit import BURST, WINDOW, RepeatLimit
from banyan.managers.reporter import Reporter
from banyan.managers.stats import EVICTION_BOUNDS, STEP_BOUNDS, SchedulerStats
from banyan.managers.tally import Histogram
from banyan.srt.metric_names import GAUGES, OWN_GAUGES, SAME_GAUGES, SCHEDULER_HISTOGRAMS, TOTALS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A harness with a reporter under a clock that the test turns."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.clock = Clock()
        self.reports: list[SchedulerReport] = []
        self.reporter = Reporter(harness.scheduler, self.reports.append, clock=self.clock)

    def after(self, seconds: float) -> SchedulerReport:
        self.clock.now += seconds
        self.reporter.turn()
        return self.reports[-1]


@pytest.fixture
def watched(make: Any) -> Watched:
    return Watched(make(max_running_requests=1))


def test_a_report_a_second_with_every_metric_that_is_exposed(watched: Watched) -> None:
    for _ in range(30):
        watched.reporter.turn()
        watched.clock.now += 0.1
    assert len(watched.reports) == 3
    report = watched.reports[-1]
    assert {*GAUGES, *OWN_GAUGES} <= set(report.gauges)
    assert {source for source, _ in SAME_GAUGES.values()} <= set(report.gauges)
    assert {source for source, _ in TOTALS.values()} <= set(report.counters)
    assert {f"{source} sum" for source, _, _ in SCHEDULER_HISTOGRAMS.values()} <= set(report.counters)


def test_loads_and_rates_are_those_of_the_scheduler(watched: Watched) -> None:
    harness = watched.harness
    watched.reporter.turn()
    harness.submit("a", prompt_of(1, 50), max_new_tokens=10, ignore_eos=True)
    harness.submit("b", prompt_of(1, 50), max_new_tokens=10, ignore_eos=True)
    harness.turn(2)
    report = watched.after(2.0)
    assert (report.gauges["num_running_reqs"], report.gauges["num_queue_reqs"]) == (1, 1)
    assert report.gauges["num_pending_tokens"] == 50
    assert report.counters["num_prefill_tokens"] == 50
    harness.drain()
    report = watched.after(2.0)
    assert report.gauges["num_running_reqs"] == report.gauges["num_queue_reqs"] == report.gauges["num_used_tokens"] == 0
    assert report.gauges["cache_hit_rate"] == pytest.approx(harness.cached["b"] / 50)
    assert report.counters["num_decode_tokens"] == 18
    assert watched.after(2.0).gauges["gen_throughput"] == 0.0
    assert report.gauges["kv_available_tokens"] + report.gauges["kv_used_tokens"] == report.gauges["max_total_num_tokens"]


def test_steps_and_evictions_are_told_as_histograms(make: Any) -> None:
    watched = Watched(make(total=64, max_running_requests=2))
    harness = watched.harness
    before = watched.after(1).counters
    for number in range(4):
        harness.submit(f"r{number}", prompt_of(number, 30), max_new_tokens=5, ignore_eos=True)
        harness.drain()
    counters = watched.after(1).counters
    total = counters.__getitem__
    steps = Histogram.of_totals("step_tokens", STEP_BOUNDS, total).series[()]
    assert sum(steps.counts) == total("num_prefill_steps") + total("num_decode_steps")
    assert steps.total == total("num_prefill_tokens") + total("num_decode_tokens")
    assert steps.counts[STEP_BOUNDS.index(1)] == total("num_decode_steps")
    evictions = Histogram.of_totals("eviction_seconds", EVICTION_BOUNDS, total).series[()]
    assert total("evicted_tokens") > 0
    assert 1 <= sum(evictions.counts) <= total("evicted_tokens")
    assert evictions.total > 0
    assert total("graph_passes_decode_none") == total("num_decode_steps")
    assert not any(value for name, value in before.items() if name.startswith(("step_tokens", "eviction_seconds", "graph_passes")))


def test_an_eviction_that_frees_nothing_is_none() -> None:
    stats = SchedulerStats()
    stats.evict(lambda num_tokens: 0, 5)
    assert not stats.evictions.series
    stats.evict(lambda num_tokens: 8, 5)
    assert sum(stats.evictions.series[()].counts) == 1


def test_the_newest_decode_step_says_whether_graphs_are_used(watched: Watched) -> None:
    stats = watched.harness.scheduler.stats
    assert watched.after(1).gauges["is_cuda_graph"] == 0
    stats.step(0.1, num_prefill_tokens=0, num_decode_rows=2, graph=True)
    stats.step(0.1, num_prefill_tokens=7, num_decode_rows=0, graph=False)
    report = watched.after(1)
    assert report.gauges["is_cuda_graph"] == 1
    assert (report.counters["graph_passes_decode_cuda_graph"], report.counters["graph_passes_prefill_none"]) == (1, 1)


def test_a_stuck_head_of_the_queue_is_told_and_warned_of_once_a_minute(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    harness = watched.harness
    harness.submit("runs", prompt_of(1, 10), max_new_tokens=500, ignore_eos=True)
    harness.submit("waits", prompt_of(2, 10), max_new_tokens=5)
    harness.turn()
    assert watched.after(1).gauges["queue_stuck_seconds"] == 0  # it was admitted just now
    harness.turn()
    assert watched.after(29).gauges["queue_stuck_seconds"] == 29
    assert caplog.records == []
    for seconds in (1, 20, 20, 15):
        watched.after(seconds)
    assert len(caplog.records) == 1
    assert "Stuck head of queue: nothing was admitted for 30 s; #queue-req: 1, #running-req: 1" in caplog.text
    watched.after(10)
    assert len(caplog.records) == 2
    harness.drain()
    assert watched.after(1).gauges["queue_stuck_seconds"] == 0


def test_an_empty_queue_and_a_pause_are_not_stuck(watched: Watched) -> None:
    watched.harness.submit("runs", prompt_of(1, 10), max_new_tokens=100, ignore_eos=True)
    watched.harness.turn()
    assert watched.after(500).gauges["queue_stuck_seconds"] == 0
    watched.harness.submit("waits", prompt_of(2, 10), max_new_tokens=5)
    watched.harness.scheduler.gate.paused = True
    assert watched.after(500).gauges["queue_stuck_seconds"] == 0


def test_a_probe_leaves_nothing_in_the_cache(make: Any) -> None:
    harness = make(chunked_prefill_size=32)
    harness.submit("real", prompt_of(1, 40), max_new_tokens=4)
    harness.drain()
    cache = harness.memory.cache
    before = (cache.evictable_size, cache.protected_size, harness.memory.allocator.available)
    harness.submit("probe", prompt_of(2, 90), max_new_tokens=4, probe=True)
    harness.drain()
    assert "probe" in harness.reasons
    assert (cache.evictable_size, cache.protected_size, harness.memory.allocator.available) == before


def record(text: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("a", level, "", 0, text, (), None)


def test_repeated_warnings_are_left_out_and_counted() -> None:
    clock = Clock()
    limit = RepeatLimit(clock)
    assert sum(limit.filter(record("again and again")) for _ in range(1000)) == BURST
    assert limit.filter(record("another"))
    assert all(limit.filter(record("again and again", logging.INFO)) for _ in range(100))
    clock.now += WINDOW
    later = record("again and again")
    assert limit.filter(later)
    assert later.getMessage() == f"again and again ({1000 - BURST} more like this were not logged)"
