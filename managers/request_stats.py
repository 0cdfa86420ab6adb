"""RequestStats: what /metrics shows of requests, counted in the tokenizer manager. Names, labels and buckets are SGLang's."""

from __future__ import annotations

from .io_struct import SchedulerReport
from .request_track import RequestTrack
from .tally import Clamped, Counter, Histogram

TTFT_BOUNDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
E2E_BOUNDS = (*TTFT_BOUNDS, 600, 1200, 1800, 2400)
ITL_BOUNDS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
QUEUE_BOUNDS = (
    *(0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90),
    *(100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000),
)
STAGE_BOUNDS = tuple(0.001 * 1.62**step for step in range(30))
TOKEN_BOUNDS = (100, 300, 500, 1000, 3000, 5000, 7000, 10000, 20000, 30000, 50000, 100000, 200000, 400000, 600000, 800000, 1100000)


N_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (0, *N_BOUNDS)


class RequestStats:
    """A Watcher; also keeps the newest report of the scheduler. On the tokenizer manager's loop."""

    def __init__(self) -> None:
        self.clamped = Clamped()
        self.report = SchedulerReport(gauges={}, counters={})
        self.past: dict[str, float] = {}  # counters of schedulers that died: totals never fall
        self.counters = {
            name: Counter(self.clamped)
            for name in (
                *("prompt_tokens", "generation_tokens", "cached_tokens", "num_requests"),
                *("num_aborted_requests", "num_so_requests", "request_success", "request_errors", "restarts"),
                "admission_rejections",  # before they came to the scheduler
                *("num_grammar", "num_grammar_cache_hit", "num_grammar_aborted", "num_grammar_timeout"),
            )
        }
        bounds = {
            "time_to_first_token_seconds": TTFT_BOUNDS,
            "inter_token_latency_seconds": ITL_BOUNDS,
            "e2e_request_latency_seconds": E2E_BOUNDS,
            "queue_time_seconds": QUEUE_BOUNDS,
            "per_stage_req_latency_seconds": STAGE_BOUNDS,
            "prompt_tokens_histogram": TOKEN_BOUNDS,
            "uncached_prompt_tokens_histogram": TOKEN_BOUNDS,
            "generation_tokens_histogram": TOKEN_BOUNDS,
            "request_time_per_output_token_seconds": ITL_BOUNDS,
            "grammar_compilation_time_seconds": STAGE_BOUNDS,
            "request_inference_time_seconds": E2E_BOUNDS,
            "request_params_n": N_BOUNDS,
            "request_params_max_tokens": TOKEN_BOUNDS,
            "request_num_preemptions": PREEMPTION_BOUNDS,
        }
        self.histograms = {name: Histogram(self.clamped, bound) for name, bound in bounds.items()}

    def take(self, report: SchedulerReport) -> None:
        """The scheduler reports."""
        self.report = report

    def restarted(self) -> None:
        """The scheduler begins again, from zero."""
        for name, value in self.report.counters.items():
            self.past[name] = self.past.get(name, 0.0) + value
        self.report = SchedulerReport(gauges={}, counters={})
        self.counters["restarts"].add(1)

    def total(self, name: str) -> float:
        """A counter of the scheduler, over all its lives."""
        return self.past.get(name, 0.0) + self.report.counters.get(name, 0.0)

    def grammar(self, seconds: float | None, *, failed: bool, timed_out: bool) -> None:
        """A request's grammar was found or compiled, in ``seconds``, or refused. seconds None: it was known."""
        counters = self.counters
        counters["num_grammar"].add(1)
        if seconds is None:
            counters["num_grammar_cache_hit"].add(1)
        elif not failed:
            self.histograms["grammar_compilation_time_seconds"].observe(seconds)
        if failed:
            counters["num_grammar_aborted"].add(1)
        if timed_out:
            counters["num_grammar_timeout"].add(1)

    def tokens(self, track: RequestTrack, count: int, gap: float) -> None:
        if track.first == track.newest:
            self.histograms["time_to_first_token_seconds"].observe(gap, _bool(track.stream))
            if count == 1:
                return
            count -= 1
            gap = 0.0
        self.histograms["inter_token_latency_seconds"].observe(gap / count, times=count)

    def ended(self, track: RequestTrack) -> None:
        stream, output, counters, histograms = _bool(track.stream), track.last, self.counters, self.histograms
        reason = track.reason
        kind = reason.kind if reason is not None else "abort"
        counters["num_requests"].add(1, stream)
        if track.structured:
            counters["num_so_requests"].add(1)
        if kind == "abort":
            counters["num_aborted_requests"].add(1)
            counters["request_errors"].add(1, (reason.err_type if reason is not None else None) or "Aborted")
        counters["request_success"].add(1, kind)
        prompt = track.prompt_tokens
        counters["prompt_tokens"].add(prompt, stream)
        histograms["prompt_tokens_histogram"].observe(prompt)
        if output is not None:
            counters["generation_tokens"].add(output.completion_tokens, stream)
            counters["cached_tokens"].add(output.cached_tokens, "device")
            histograms["uncached_prompt_tokens_histogram"].observe(prompt - output.cached_tokens)
            histograms["generation_tokens_histogram"].observe(output.completion_tokens)
            histograms["request_num_preemptions"].observe(output.num_retractions)
        self._times(track, stream)

    def _times(self, track: RequestTrack, stream: str) -> None:
        self.histograms["e2e_request_latency_seconds"].observe(track.ended - track.created, stream)
        phases = track.phases()
        if "decode" in phases:
            self.histograms["request_inference_time_seconds"].observe(phases["prefill"] + phases["decode"])
        if track.message is not None:
            params = track.message.sampling_params
            self.histograms["request_params_n"].observe(params.n)
            self.histograms["request_params_max_tokens"].observe(params.max_new_tokens or 0)
        for name, seconds in phases.items():
            self.histograms["per_stage_req_latency_seconds"].observe(seconds, name)
            if name == "queue":
                self.histograms["queue_time_seconds"].observe(seconds)
        num_more = track.last.completion_tokens - 1 if track.last is not None else 0
        if num_more > 0:
            mean = (track.newest - track.first) / num_more
            self.histograms["request_time_per_output_token_seconds"].observe(mean)


def _bool(value: bool) -> str:
    return "true" if value else "false"
