"""GET /metrics in Prometheus' text format: SGLang's names, vLLM's for what is the same, and our own under ``banyan:``.

Everything is read when it is asked for: counting costs a request a few additions, and a scrape cannot fail one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.responses import Response

from ..managers.tally import Counter, Histogram, Series
from .http_metrics import HttpCounts
from .metric_names import (
    COUNTERS,
    GAUGES,
    GRAPH_MODES,
    HISTOGRAMS,
    OWN_GAUGES,
    REPLICA_GAUGES,
    SAME_GAUGES,
    SCHEDULER_HISTOGRAMS,
    STAGES,
    TOTALS,
    VLLM_HISTOGRAMS,
    WEIGHT_SOURCES,
)

if TYPE_CHECKING:
    from ..managers.tokenizer_manager import TokenizerManager
    from .server_state import ServerState

router = APIRouter()


class EngineCollector(Collector):
    """One server's metrics."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from _http(self._state.http_counts)
        tm = self._state.tm
        if tm is None:
            return
        name = tm.config.served_model_name
        request = {"model_name": name, "engine_type": "unified"}
        scheduler = {**request, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        vllm = {"model_name": name, "engine": "0"}
        yield from _scheduler_gauges(tm, scheduler, vllm)
        yield from _scheduler_totals(tm, scheduler, vllm)
        yield from _request_counters(tm, request, vllm)
        yield from _request_histograms(tm, request, vllm)
        yield from _own(self._state, tm, request)


def exposition(state: ServerState) -> bytes:
    """The reply's body."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(state))
    return generate_latest(registry)


def install(app: FastAPI, state: ServerState) -> None:
    """Add the route."""

    async def metrics() -> Response:
        """All metrics, for Prometheus."""
        return Response(exposition(state), headers={"content-type": CONTENT_TYPE_LATEST})

    app.get("/metrics", response_class=Response)(metrics)


# --- families ---------------------------------------------------------------------------------------------------------------------

Labels = dict[str, str]


def _gauge(name: str, text: str, labels: Labels, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _total(name: str, text: str, labels: Labels, values: Iterable[tuple[tuple[str, ...], float]], more: tuple[str, ...]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*labels, *more])
    for own, value in values:
        family.add_metric([*labels.values(), *own], value)
    return family


def _histogram(name: str, text: str, labels: Labels, source: Histogram, more: tuple[str, ...]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[*labels, *more])
    bounds = [f"{bound:g}" for bound in source.bounds] + ["+Inf"]
    for own, series in (source.series or ({(): Series([0] * len(bounds))} if not more else {})).items():
        buckets = list(zip(bounds, accumulate(series.counts), strict=True))
        family.add_metric([*labels.values(), *own[: len(more)]], buckets=buckets, sum_value=series.total)
    return family


# --- what is shown ----------------------------------------------------------------------------------------------------------------


def _scheduler_gauges(tm: TokenizerManager, labels: Labels, vllm: Labels) -> Iterator[Metric]:
    gauges = tm.stats.report.gauges
    for prefix, table in (("sglang", GAUGES), ("banyan", OWN_GAUGES)):
        for name, text in table.items():
            if name in gauges:
                yield _gauge(f"{prefix}:{name}", text, labels, gauges[name])
    for name, (source, text) in SAME_GAUGES.items():
        if source in gauges:
            yield _gauge(name, text, vllm, gauges[source])
    if "memory_released" in gauges:
        yield _sleep_state(gauges, vllm)
    if "num_queue_reqs" in gauges:
        reason = {**vllm, "reason": "capacity"}
        yield _gauge("vllm:num_requests_waiting_by_reason", "Requests that wait", reason, gauges["num_queue_reqs"])
    yield _gauge("sglang:num_grammar_queue_reqs", "Requests that wait for a grammar", labels, tm.num_waiting_for_grammars)
    yield _gauge(
        "sglang:routing_keys_active", "Different routing keys of the requests that have not ended", {}, tm.num_routing_keys
    )
    yield _weight_loads(gauges, labels)
    info = tm.info
    for name, text, num_bytes in (
        ("weight_memory_usage_gb", "Memory of the weights", info.model.memory.weights),
        ("kv_cache_memory_usage_gb", "Memory of the KV cache", info.model.memory.kv_token * info.max_total_num_tokens),
    ):
        yield _gauge(f"sglang:{name}", text, labels, num_bytes / (1 << 30))
    yield _gauge("sglang:context_len", "Longest sequence", labels, info.model.context_len)
    sizes = {"page_size": str(info.page_size), "num_pages": str(info.max_total_num_tokens // info.page_size)}
    yield _gauge("sglang:cache_config_info", "Shape of the KV cache", {**labels, **sizes}, 1)
    blocks = {"block_size": sizes["page_size"], "num_gpu_blocks": sizes["num_pages"]}
    yield _gauge("vllm:cache_config_info", "Shape of the KV cache", {**vllm, **blocks}, 1)


def _weight_loads(gauges: dict[str, float], labels: Labels) -> Metric:
    family = GaugeMetricFamily(
        "sglang:weight_load_duration_seconds", "Time that the newest update of the weights took", labels=[*labels, "source"]
    )
    for source in WEIGHT_SOURCES:
        if (seconds := gauges.get(f"weight_load_seconds {source}")) is not None:
            family.add_metric([*labels.values(), source], seconds)
    return family


def _sleep_state(gauges: dict[str, float], vllm: Labels) -> Metric:
    """Released weights come back as they were, so nothing is ever discarded for good."""
    family = GaugeMetricFamily("vllm:engine_sleep_state", "Whether memory is released", labels=[*vllm, "sleep_state"])
    states = {"awake": 1 - gauges["memory_released"], "weights_offloaded": gauges["weights_released"], "discard_all": 0.0}
    for state, value in states.items():
        family.add_metric([*vllm.values(), state], value)
    return family


def _scheduler_totals(tm: TokenizerManager, labels: Labels, vllm: Labels) -> Iterator[Metric]:
    stats = tm.stats
    for name, (source, text) in TOTALS.items():
        yield _total(name, text, vllm if name.startswith("vllm") else labels, [((), stats.total(source))], ())
    modes = {"prefill_compute": "num_prefill_tokens", "prefill_cache": "num_cached_prompt_tokens", "decode": "num_decode_tokens"}
    values = [((mode,), stats.total(source)) for mode, source in modes.items()]
    yield _total("sglang:realtime_tokens", "Tokens as they are computed", labels, values, ("mode",))
    sources = {"local_compute": "num_prefill_tokens", "local_cache_hit": "num_cached_prompt_tokens"}
    values = [((place,), stats.total(source)) for place, source in sources.items()]
    yield _total("vllm:prompt_tokens_by_source", "Prompt tokens, by where their KV came from", vllm, values, ("source",))
    cached = [((), stats.total("num_cached_prompt_tokens"))]
    yield _total("vllm:prompt_tokens_cached", "Prompt tokens that were found in the cache", vllm, cached, ())
    for name, (source, bounds, text) in SCHEDULER_HISTOGRAMS.items():
        histogram = Histogram.of_totals(source, bounds, stats.total)
        yield _histogram(name, text, vllm if name.startswith("vllm") else labels, histogram, ())
    passes = [((mode,), stats.total(f"graph_passes_{mode}")) for mode in GRAPH_MODES]
    yield _total("sglang:cuda_graph_passes", "Steps, by whether they were replayed from a recording", labels, passes, ("mode",))
    kinds = [((kind,), stats.total(f"forward_seconds_{kind}")) for kind in ("prefill", "decode", "mixed")]
    yield _total("sglang:forward_execution_seconds", "Time on the device by kind of step", labels, kinds, ("category",))
    cpu = [(("scheduler",), stats.total("process_cpu_seconds")), (("tokenizer_manager",), time.process_time())]
    yield _total("sglang:process_cpu_seconds", "CPU time of the processes", labels, cpu, ("component",))


def _request_counters(tm: TokenizerManager, labels: Labels, vllm: Labels) -> Iterator[Metric]:
    counters = tm.stats.counters
    for name, (also_vllm, more, text) in COUNTERS.items():
        values = _values(counters[name], more)
        yield _total(f"sglang:{name}", text, labels, values, more)
        if also_vllm:
            yield _total(f"vllm:{name}", text, vllm, [((), math.fsum(value for _, value in values))], ())
    success = [(own, value) for own, value in counters["request_success"].values.items()]
    yield _total("vllm:request_success", "Requests that ended, by reason", vllm, success, ("finished_reason",))
    full = counters["admission_rejections"].values.get((), 0.0) + tm.stats.total("num_refused")
    rejections = [(("max_num_queued_reqs",), full)]
    yield _total(
        "vllm:admission_rejections", "Requests that were refused because the queue was full", vllm, rejections, ("reason",)
    )
    errors = [(own, value) for own, value in counters["request_errors"].values.items()]
    yield _total("banyan:request_errors", "Requests that failed or were aborted, by class", labels, errors, ("class",))


def _values(counter: Counter, more: tuple[str, ...]) -> list[tuple[tuple[str, ...], float]]:
    """Rates need a beginning: a counter without labels of its own is 0 from the start."""
    return list(counter.values.items()) or ([((), 0.0)] if not more else [])


def _request_histograms(tm: TokenizerManager, labels: Labels, vllm: Labels) -> Iterator[Metric]:
    histograms = tm.stats.histograms
    for name, (more, same, text) in HISTOGRAMS.items():
        source = histograms[name]
        yield _histogram(f"sglang:{name}", text, labels, source, more)
        if same:
            yield _histogram(f"vllm:{same}", text, vllm, _merged(source) if more else source, ())
    for name, text in VLLM_HISTOGRAMS.items():
        yield _histogram(f"vllm:{name}", text, vllm, histograms[name], ())
    stages = histograms["per_stage_req_latency_seconds"]
    for stage, same in STAGES.items():
        one = Histogram(stages.clamped, stages.bounds, {(): found} if (found := stages.series.get((stage,))) else {})
        yield _histogram(f"vllm:{same}", f"In the phase {stage}", vllm, one, ())


def _merged(source: Histogram) -> Histogram:
    """All series as one."""
    merged = Histogram(source.clamped, source.bounds)
    for series in source.series.values():
        for bound, count in zip([*source.bounds, math.inf], series.counts, strict=True):
            if count:
                merged.observe(min(bound, 1e300), times=count)
    if () in merged.series:
        merged.series[()].total = math.fsum(series.total for series in source.series.values())
    return merged


def _own(state: ServerState, tm: TokenizerManager, labels: Labels) -> Iterator[Metric]:
    stats = tm.stats
    yield _gauge("banyan:ready", "1 while new requests are taken", labels, float(state.unready_reason() is None))
    yield _gauge("banyan:num_live_requests", "Requests that have not ended", labels, tm.num_live)
    yield _total(
        "banyan:restarts",
        "Times that the engine's processes were started again",
        labels,
        _values(stats.counters["restarts"], ()),
        (),
    )
    yield _total("banyan:metrics_clamped", "Values that were negative or no number", labels, [((), stats.clamped.count)], ())
    startup = GaugeMetricFamily("sglang:startup_time_seconds", "Phases of the start", labels=[*labels, "phase"])
    for phase, seconds in {**state.clock.phases, "total": state.startup_time or 0.0}.items():
        startup.add_metric([*labels.values(), phase], seconds)
    yield startup
    for name, text in REPLICA_GAUGES.items():
        family = GaugeMetricFamily(f"banyan:replica_{name}", text, labels=[*labels, "dp_rank"])
        for rank, beat in tm.health().replicas.items():
            family.add_metric([*labels.values(), str(rank)], getattr(beat, name))
        yield family


def _http(counts: HttpCounts) -> Iterator[Metric]:
    yield _total("sglang:http_requests", "HTTP requests", {}, list(counts.requests.values.items()), ("endpoint", "method"))
    responses = list(counts.responses.values.items())
    yield _total("sglang:http_responses", "HTTP responses", {}, responses, ("endpoint", "status_code", "method"))
    active = GaugeMetricFamily("sglang:http_requests_active", "HTTP requests under way", labels=["endpoint", "method"])
    for own, value in counts.active.items():
        active.add_metric(list(own), value)
    yield active
