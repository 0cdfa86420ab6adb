"""Counting requests: nothing raises, totals never fall, phases add up."""

from __future__ import annotations

import json
import logging
import math

import pytest

from banyan.managers.generation import Output
from banyan.managers.io_struct import FinishReason, GenerateReq, SchedulerReport, Timings, pack_ids
from banyan.managers.request_context import RequestContext
from banyan.managers.request_log import RequestLog
from banyan.managers.request_stats import RequestStats
from banyan.managers.request_track import RequestTrack, RequestWatch
from banyan.managers.sampling_params import SamplingParams
from banyan.managers.tally import Clamped, Counter, Histogram

STOP = FinishReason(kind="stop", matched=2)


def track_of(*, probe: bool = False, stream: bool = False) -> RequestTrack:
    track = RequestTrack("r")
    params = SamplingParams(max_new_tokens=8)
    message = GenerateReq(rid="r", input_ids=pack_ids([1, 2, 3]), sampling_params=params, stream=stream, probe=probe)
    track.begin(message, "a secret", RequestContext("mine", given=True))
    return track


def output(num: int, total: int, reason: FinishReason | None = None) -> Output:
    return Output(
        index=0,
        text="ab" * num,
        token_ids=[7] * num,
        finish_reason=reason,
        prompt_tokens=3,
        completion_tokens=total,
        cached_tokens=2,
        num_retractions=0,
    )


@pytest.mark.parametrize("value", [-1.0, -math.inf, math.inf, math.nan])
def test_odd_values_are_clamped_and_counted_and_never_raise(value: float) -> None:
    clamped = Clamped()
    counter, histogram = Counter(clamped), Histogram(clamped, (0.1, 1.0))
    counter.add(3)
    counter.add(value)
    histogram.observe(value)
    assert counter.values == {(): 3.0}
    assert histogram.series[()].counts == [1, 0, 0]
    assert histogram.series[()].total == 0.0
    assert clamped.count == 2


def test_nonsense_of_a_request_is_counted_as_zero_and_reaches_its_client() -> None:
    stats = RequestStats()
    watch, track = RequestWatch([stats]), track_of(stream=True)
    track.created, track.sent = math.inf, -math.inf
    last = output(2, -5, STOP)
    last.cached_tokens, last.num_retractions = 10**9, -1
    watch.row(track, last, Timings(received=math.nan, seated=math.nan, sampled=-math.inf))
    assert (last.finish_reason, last.token_ids) == (STOP, [7, 7])
    assert stats.counters["generation_tokens"].values == {("true",): 0}
    assert stats.histograms["uncached_prompt_tokens_histogram"].series[()].total == 0
    assert stats.histograms["time_to_first_token_seconds"].series[("true",)].total == 0
    assert stats.clamped.count >= 5


def test_histograms_count_by_bucket_with_inclusive_upper_bounds() -> None:
    histogram = Histogram(Clamped(), (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 2.0):
        histogram.observe(value, "a")
    histogram.observe(0.5, "a", times=3)
    assert histogram.series[("a",)].counts == [2, 4, 1]
    assert histogram.series[("a",)].total == pytest.approx(4.15)


def test_a_request_is_counted_once_with_its_phases() -> None:
    stats = RequestStats()
    watch, track = RequestWatch([stats]), track_of(stream=True)
    track.sent -= 3
    watch.row(track, output(1, 1), Timings(received=track.sent + 0.5, seated=track.sent + 1, sampled=track.sent + 3))
    watch.row(track, output(4, 5), None)
    last = output(1, 6, STOP)
    watch.row(track, last, None)
    assert set(last.phases) == {"tokenize", "queue", "prefill", "decode"}
    assert last.phases["queue"] == pytest.approx(1)
    assert last.phases["prefill"] == pytest.approx(2)
    assert last.phases["decode"] >= 0
    assert stats.counters["num_requests"].values == {("true",): 1}
    assert stats.counters["generation_tokens"].values == {("true",): 6}
    assert stats.counters["cached_tokens"].values == {("device",): 2}
    assert sum(stats.histograms["time_to_first_token_seconds"].series[("true",)].counts) == 1
    assert sum(stats.histograms["inter_token_latency_seconds"].series[()].counts) == 5
    assert sum(stats.histograms["uncached_prompt_tokens_histogram"].series[()].counts) == 1


@pytest.mark.parametrize("offset", [-1e6, 1e6])
def test_times_of_another_machine_are_no_phases(offset: float) -> None:
    track, last = track_of(), output(1, 1, STOP)
    there = track.sent + offset
    RequestWatch([]).row(track, last, Timings(received=there, seated=there + 0.1, sampled=there + 0.2))
    assert set(last.phases) == {"tokenize"}


def test_errors_are_counted_by_class() -> None:
    stats = RequestStats()
    watch = RequestWatch([stats])
    watch.failed(track_of(), FinishReason(kind="abort", message="m", status_code=503, err_type="EngineDeadError"))
    watch.row(track_of(), output(0, 0, FinishReason(kind="abort", message="by the client")), None)
    assert stats.counters["request_errors"].values == {("EngineDeadError",): 1, ("Aborted",): 1}
    assert stats.counters["request_success"].values == {("abort",): 2}


def test_probes_are_neither_counted_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats = RequestStats()
    watch = RequestWatch([stats, RequestLog(3, "text")], keep_texts=True)
    watch.row(track_of(probe=True), output(1, 1, STOP), None)
    assert not any(counter.values for counter in stats.counters.values())
    assert caplog.records == []


def test_totals_survive_a_scheduler() -> None:
    stats = RequestStats()
    stats.take(SchedulerReport(gauges={"num_queue_reqs": 4}, counters={"evicted_tokens": 10}))
    stats.restarted()
    assert (stats.total("evicted_tokens"), stats.report.gauges) == (10, {})
    stats.take(SchedulerReport(gauges={}, counters={"evicted_tokens": 3}))
    assert stats.total("evicted_tokens") == 13


@pytest.mark.parametrize(("level", "params", "texts"), [(0, False, False), (1, True, False), (2, True, True)])
def test_one_line_per_request_and_no_text_unless_asked(
    level: int, params: bool, texts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watch, track = RequestWatch([RequestLog(level, "json")], keep_texts=level >= 2), track_of()
    watch.row(track, output(1, 1), None)
    watch.row(track, output(2, 3, STOP), None)
    (record,) = caplog.records
    line = json.loads(record.getMessage())
    assert (line["rid"], line["request_id"], line["prompt_tokens"], line["completion_tokens"]) == ("r", "mine", 3, 3)
    assert ("sampling_params" in line) is params
    assert (line.get("prompt"), line.get("output")) == (("a secret", "ababab") if texts else (None, None))
    assert ("secret" in record.getMessage()) is texts


def test_long_texts_are_cut_at_level_two_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for level, length in ((2, 2048), (3, 4000)):
        caplog.clear()
        watch = RequestWatch([RequestLog(level, "json")], keep_texts=True)
        watch.row(track_of(), output(2000, 2000, STOP), None)
        assert len(json.loads(caplog.records[0].getMessage())["output"]) == length


def test_output_of_unknown_requests_is_warned_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    watch = RequestWatch()
    for _ in range(100):
        watch.stray("gone")
    assert len(caplog.records) == 1
