"""``banyan top``: queues, batch, cache and latencies of a running server, live in a terminal."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from .plain_http import Server, fetch

CLEAR = "\x1b[H\x1b[2J"
BAR = 30  # characters
_SAMPLE = re.compile(r"(\w+:\w+)(?:\{(.*?)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """One line of /metrics."""

    labels: Labels
    value: float


Metrics = Mapping[str, list[Sample]]


def top(server: Server, *, interval: float, once: bool) -> None:
    """Draw until Ctrl-C, or once. Raises StartError if no server answers."""
    before, at = read(server), time.monotonic()
    if once:
        print(screen(server.url, before, before, 1.0))
        return
    while True:
        time.sleep(interval)
        now, later = read(server), time.monotonic()
        sys.stdout.write(CLEAR + screen(server.url, before, now, later - at) + "\n")
        sys.stdout.flush()
        before, at = now, later


def read(server: Server) -> Metrics:
    """The server's metrics; without --enable-metrics what /server_info tells, under the same names."""
    text = fetch(server, "/metrics", missing="")
    return parse(text) if text else _from_info(json.loads(fetch(server, "/server_info")))


def parse(text: str) -> Metrics:
    """Samples by name."""
    found: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match:
            labels = tuple(_LABEL.findall(match[2] or ""))
            found.setdefault(match[1], []).append(Sample(labels, float(match[3])))
    return found


def _from_info(info: dict[str, Any]) -> Metrics:
    state = info["internal_states"][0]
    names = {
        "sglang:num_running_reqs": "num_running_reqs",
        "sglang:num_queue_reqs": "num_waiting_reqs",
        "sglang:token_usage": "token_usage",
        "sglang:num_used_tokens": "num_used_tokens",
        "sglang:max_total_num_tokens": "max_total_num_tokens",
        "banyan:num_cached_tokens": "num_cached_tokens",
        "sglang:gen_throughput": "last_gen_throughput",
        "sglang:num_retracted_requests_total": "num_retracted",
        "vllm:generation_tokens_total": "num_decode_tokens",
    }
    return {name: [Sample((), float(state[source]))] for name, source in names.items()}


def screen(url: str, before: Metrics, now: Metrics, seconds: float) -> str:
    """One picture; rates and latencies are over the time between the two readings, or since the start if they are the same."""
    usage, cached = total(now, "sglang:token_usage"), total(now, "banyan:num_cached_tokens")
    slots = max(total(now, "sglang:max_total_num_tokens"), 1.0)

    def rate(name: str) -> float:
        return (total(now, name) - total(before, name)) / seconds

    lines = [
        f"banyan top  {url}  {time.strftime('%H:%M:%S')}",
        "",
        f"running  {total(now, 'sglang:num_running_reqs'):6.0f}   waiting  {total(now, 'sglang:num_queue_reqs'):6.0f}   "
        f"stuck {total(now, 'banyan:queue_stuck_seconds'):5.0f} s   restarts {total(now, 'banyan:restarts_total'):.0f}",
        f"KV held  {_bar(usage)} {usage:6.1%}",
        f"cached   {_bar(cached / slots)} {cached / slots:6.1%} of {slots:.0f} tokens",
        f"hit rate {_bar(total(now, 'sglang:cache_hit_rate'))} {total(now, 'sglang:cache_hit_rate'):6.1%}",
        "",
        f"tokens/s out {total(now, 'sglang:gen_throughput'):9.1f}   requests/s {rate('sglang:num_requests_total'):7.2f}   "
        f"errors/s {rate('banyan:request_errors_total'):6.2f}   retractions/s {rate('sglang:num_retracted_requests_total'):6.2f}   "
        f"evicted/s {rate('sglang:evicted_tokens_total'):8.1f}",
        "",
        "              p50        p90        p99",
    ]
    for title, name in (("TTFT", "time_to_first_token"), ("ITL", "inter_token_latency"), ("e2e", "e2e_request_latency")):
        values = [quantile(before, now, f"sglang:{name}_seconds_bucket", share) for share in (0.5, 0.9, 0.99)]
        lines.append(f"{title:6}" + "".join(f"{_milliseconds(value):>11}" for value in values))
    return "\n".join(lines)


def total(metrics: Metrics, name: str) -> float:
    """Sum over all labels."""
    return sum(sample.value for sample in metrics.get(name, []))


def quantile(before: Metrics, now: Metrics, name: str, share: float) -> float | None:
    """Upper bound of the bucket that holds the quantile; None if nothing was observed."""
    old = {} if before is now else _buckets(before, name)
    counts = {bound: count - old.get(bound, 0.0) for bound, count in _buckets(now, name).items()}
    most = max(counts.values(), default=0.0)
    if most <= 0:
        return None
    return next(bound for bound in sorted(counts) if counts[bound] >= share * most)


def _buckets(metrics: Metrics, name: str) -> dict[float, float]:
    found: dict[float, float] = {}
    for labels, value in metrics.get(name, []):
        bound = float(dict(labels)["le"])
        found[bound] = found.get(bound, 0.0) + value
    return found


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"<={value * 1e3:g} ms"


def _bar(share: float) -> str:
    filled = round(min(max(share, 0.0), 1.0) * BAR)
    return "[" + "#" * filled + "." * (BAR - filled) + "]"
