"""RequestLog: one line per request when it ends."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from .request_track import RequestTrack

log = logging.getLogger(__name__)

SHORT = 2048  # characters of prompt and output at level 2
PARAMS, TEXTS, ALL = 1, 2, 3


class RequestLog:
    """A Watcher. level 0: id, counts and times; 1: sampling parameters too; 2: prompt and output, cut short; 3: all of them."""

    def __init__(self, level: int, style: str) -> None:
        """style: "text" or "json"."""
        self._level = level
        self._json = style == "json"

    def tokens(self, track: RequestTrack, count: int, gap: float) -> None:
        """Nothing is said before the end."""

    def ended(self, track: RequestTrack) -> None:
        fields = self._fields(track)
        if self._json:
            log.info("%s", msgspec.json.encode({"event": "request.finished", **fields}).decode())
        else:
            log.info("Finish: %s", ", ".join(f"{name}={value}" for name, value in fields.items()))

    def _fields(self, track: RequestTrack) -> dict[str, Any]:
        reason, last = track.reason, track.last
        fields: dict[str, Any] = {
            "rid": track.rid,
            "reason": reason.kind if reason is not None else "abort",
            "stream": track.stream,
            "prompt_tokens": track.prompt_tokens,
            "cached_tokens": last.cached_tokens if last is not None else 0,
            "completion_tokens": last.completion_tokens if last is not None else 0,
            "num_retractions": last.num_retractions if last is not None else 0,
            "e2e_s": round(track.ended - track.created, 4),
        }
        if track.request_id:
            fields["request_id"] = track.request_id
        if track.first:
            fields["ttft_s"] = round(track.first - track.created, 4)
        fields |= {f"{name}_s": round(seconds, 4) for name, seconds in track.phases().items()}
        if reason is not None and reason.err_type:
            fields["error"] = reason.err_type
        if self._level >= PARAMS and track.message is not None:
            fields["sampling_params"] = msgspec.to_builtins(track.message.sampling_params)
        if self._level >= TEXTS:
            limit = None if self._level >= ALL else SHORT
            fields["prompt"] = (track.prompt or "")[:limit]
            fields["output"] = "".join(track.texts)[:limit]
        return fields
