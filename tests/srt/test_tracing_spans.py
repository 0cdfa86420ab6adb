"""Spans of requests: their phases, their parent, and that nothing is loaded when tracing is off."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from banyan.managers.generation import Output
from banyan.managers.io_struct import FinishReason, GenerateReq, Timings, pack_ids
from banyan.managers.request_context import RequestContext
from banyan.managers.request_track import RequestTrack, RequestWatch
from banyan.managers.sampling_params import SamplingParams
from banyan.srt.tracing import Tracer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def spans_of(traceparent: str, *, probe: bool = False) -> dict[str, ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    track = RequestTrack("r")
    message = GenerateReq(rid="r", input_ids=pack_ids([1, 2]), sampling_params=SamplingParams(max_new_tokens=3), probe=probe)
    track.begin(message, None, RequestContext("id", traceparent=traceparent))
    output = Output(
        index=0,
        text="",
        token_ids=[1, 2, 3],
        finish_reason=FinishReason(kind="length", length=3),
        prompt_tokens=2,
        completion_tokens=3,
        cached_tokens=1,
        num_retractions=0,
    )
    times = Timings(received=track.sent, seated=track.sent, sampled=track.sent)
    RequestWatch([Tracer(provider, model="m")]).row(track, output, times)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_span_per_phase_under_the_callers() -> None:
    spans = spans_of(f"00-{TRACE}-{SPAN}-01")
    assert set(spans) == {"request_process", "tokenize", "prefill_waiting", "prefill_forward", "decode_loop"}
    root = spans["request_process"]
    assert root.context is not None and root.parent is not None
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == SPAN
    for name, span in spans.items():
        if name != "request_process":
            assert span.parent is not None and span.parent.span_id == root.context.span_id
            assert span.start_time is not None and span.end_time is not None and root.start_time is not None
            assert root.start_time <= span.start_time <= span.end_time
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.completion_tokens"] == 3
    assert root.attributes["gen_ai.request.max_tokens"] == 3


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01"])
def test_without_a_valid_parent_a_trace_begins(traceparent: str) -> None:
    assert spans_of(traceparent)["request_process"].parent is None


def test_probes_are_not_traced() -> None:
    assert spans_of("", probe=True) == {}


def test_nothing_is_loaded_when_tracing_is_off() -> None:
    code = "import sys, banyan.srt.life; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
