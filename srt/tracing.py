"""OpenTelemetry spans of requests: one for the whole and one per phase, made when a request ends, from times that are taken anyway.

So a request costs nothing while it runs, and nothing at all without ``--enable-trace``. Needs the extra ``otel``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..managers.errors import StartError
from ..managers.request_track import RequestTrack

if TYPE_CHECKING:
    from ..managers.tokenizer_manager import TokenizerManager
    from .server_args import ServerArgs

# names of SGLang's spans by phase
SPANS = {"tokenize": "tokenize", "queue": "prefill_waiting", "prefill": "prefill_forward", "decode": "decode_loop"}
NANO = 1_000_000_000


def install(tm: TokenizerManager, args: ServerArgs) -> None:
    """Trace the manager's requests, if that is asked for. Raises StartError without the packages."""
    if args.enable_trace:
        tm.watch.watchers.append(Tracer(_provider(args.otlp_traces_endpoint), model=tm.config.served_model_name))


class Tracer:
    """A Watcher. ``provider`` is an OpenTelemetry TracerProvider."""

    def __init__(self, provider: Any, *, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("banyan")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._offset = time.time() - time.monotonic()

    def tokens(self, track: RequestTrack, count: int, gap: float) -> None:
        """Spans are made at the end."""

    def ended(self, track: RequestTrack) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = self._propagator.extract({"traceparent": track.trace}) if track.trace else None
        root = self._tracer.start_span(
            "request_process", context=parent, start_time=self._at(track.created), attributes=self._attributes(track)
        )
        context, begin = set_span_in_context(root), track.created
        for phase, seconds in track.phases().items():
            span = self._tracer.start_span(SPANS[phase], context=context, start_time=self._at(begin))
            begin += seconds
            span.end(self._at(begin))
        root.end(self._at(track.ended))

    def _at(self, monotonic: float) -> int:
        return int((monotonic + self._offset) * NANO)

    def _attributes(self, track: RequestTrack) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.request.id": track.rid,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [track.reason.kind if track.reason is not None else "abort"],
            "gen_ai.usage.prompt_tokens": track.prompt_tokens,
            "gen_ai.latency.e2e": track.ended - track.created,
        }
        if track.message is not None:
            params = track.message.sampling_params
            found["gen_ai.request.max_tokens"] = params.max_new_tokens or 0
            found["gen_ai.request.temperature"] = params.temperature
            found["gen_ai.request.top_p"] = params.top_p
            found["gen_ai.request.top_k"] = params.top_k
        if track.last is not None:
            found["gen_ai.usage.completion_tokens"] = track.last.completion_tokens
            found["gen_ai.usage.cached_tokens"] = track.last.cached_tokens
        if track.first:
            found["gen_ai.latency.time_to_first_token"] = track.first - track.created
        names = {"queue": "time_in_queue", "prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}
        phases = track.phases()
        return found | {f"gen_ai.latency.{name}": phases[phase] for phase, name in names.items() if phase in phases}


def _provider(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartError(f"--enable-trace needs the extra: pip install 'banyan-engine[otel]' ({error})") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "banyan"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
