"""RequestTrack: what is known of one request from its arrival to its end, for metrics, logs and traces. No decision reads it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .generation import Output
from .io_struct import FinishReason, GenerateReq, Timings, unpack_ids
from .request_context import RequestContext

log = logging.getLogger(__name__)

STRAY_LOG_INTERVAL = 60.0  # seconds between two warnings about rows of unknown rids


@dataclass(slots=True)
class RequestTrack:
    """Times are seconds on the machine's monotonic clock; 0: it has not come to that yet."""

    rid: str
    created: float = field(default_factory=time.monotonic)
    message: GenerateReq | None = None  # as it was sent to the scheduler
    prompt: str | None = None  # its text, where it came as text
    structured: bool = False  # it has a grammar
    trace: str = ""  # the traceparent that it came with
    request_id: str = ""  # the client's own name for the call
    sent: float = 0.0
    timings: Timings | None = None
    first: float = 0.0  # its first tokens arrived
    newest: float = 0.0  # its newest tokens arrived
    ended: float = 0.0
    last: Output | None = None  # its newest output
    reason: FinishReason | None = None
    texts: list[str] = field(default_factory=list)  # of its output, if a watcher wants them

    def begin(self, message: GenerateReq, prompt: str | None, context: RequestContext | None) -> None:
        """It is checked and tokenised."""
        self.sent, self.message, self.prompt = time.monotonic(), message, prompt
        self.structured = bool(message.grammar_key)
        if context is not None:
            self.trace, self.request_id = context.traceparent, context.id if context.given else ""

    @property
    def is_hidden(self) -> bool:
        """A probe or a warm-up: no metric, log line or trace tells of it."""
        return self.message is not None and self.message.probe

    @property
    def stream(self) -> bool:
        return self.message is not None and self.message.stream

    @property
    def routing_key(self) -> str:
        return self.message.routing_key if self.message is not None else ""

    @property
    def prompt_tokens(self) -> int:
        return len(unpack_ids(self.message.input_ids)) if self.message is not None else 0

    def phases(self) -> dict[str, float]:
        """Seconds in each phase that it has come to the end of: tokenize (with the wait for a grammar), queue, prefill, decode."""
        found: dict[str, float] = {}
        if self.sent:
            found["tokenize"] = self.sent - self.created
        if self.timings is not None and self._on_this_clock(self.timings):
            found["queue"] = self.timings.seated - self.sent
            found["prefill"] = self.timings.sampled - self.timings.seated
            if self.ended:
                found["decode"] = self.ended - self.timings.sampled
        return {name: max(seconds, 0.0) for name, seconds in found.items()}

    def _on_this_clock(self, timings: Timings) -> bool:
        """False for the times of another machine."""
        return self.sent <= timings.seated <= timings.sampled <= (self.first or time.monotonic())


class Watcher(Protocol):
    """Told of each request. Must not raise: it runs between a request and its client."""

    def tokens(self, track: RequestTrack, count: int, gap: float) -> None:
        """``count`` new tokens arrived, ``gap`` seconds after those before; the first ones with the time since its creation."""

    def ended(self, track: RequestTrack) -> None:
        """Its last output arrived, or it failed with the engine (then ``reason`` says so)."""


class RequestWatch:
    """Keeps tracks up to date and tells the watchers."""

    def __init__(self, watchers: Iterable[Watcher] = (), *, keep_texts: bool = False) -> None:
        self.watchers = list(watchers)
        self._keep_texts = keep_texts
        self._stray_logged = -STRAY_LOG_INTERVAL

    def row(self, track: RequestTrack, output: Output, timings: Timings | None) -> None:
        """A row of output arrived; the phases of a finished request are told to the client with its last row."""
        now = time.monotonic()
        track.last = output
        if timings is not None:
            track.timings = timings
        if self._keep_texts:
            track.texts.append(output.text)
        count = len(output.token_ids)
        if count:
            gap = now - (track.newest or track.created)
            track.first, track.newest = track.first or now, now
            self._tell(track, lambda watcher: watcher.tokens(track, count, gap))
            output.first_token_latency = track.first - track.created
        if output.finish_reason is not None:
            track.ended, track.reason = now, output.finish_reason
            output.first_token_latency = track.first - track.created if track.first else None
            output.phases = track.phases()
            self._tell(track, lambda watcher: watcher.ended(track))

    def failed(self, track: RequestTrack, reason: FinishReason) -> None:
        """It ended without an output."""
        track.ended, track.reason = time.monotonic(), reason
        self._tell(track, lambda watcher: watcher.ended(track))

    def _tell(self, track: RequestTrack, tell: Callable[[Watcher], None]) -> None:
        if not track.is_hidden:
            for watcher in self.watchers:
                tell(watcher)

    def stray(self, rid: str) -> None:
        """Output of an unknown rid was dropped."""
        now = time.monotonic()
        if now - self._stray_logged >= STRAY_LOG_INTERVAL:
            self._stray_logged = now
            log.warning("output for %r, which is not live, was dropped", rid)
