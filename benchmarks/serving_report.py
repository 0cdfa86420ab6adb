"""From replies to numbers: the metrics of a load, defined once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from http_load import Reply, Run
from report import number, spread

HEAD = ("metric", "value / mean", "p50", "p90", "p99")
LATENCIES = {  # key -> row; all in milliseconds
    "ttft_ms": "TTFT, ms",
    "itl_ms": "ITL, ms",
    "tpot_ms": "TPOT, ms",
    "e2e_ms": "E2E latency, ms",
}
COUNTS = {
    "completed": "requests completed",
    "failed": "requests failed",
    "short_outputs": "outputs shorter than asked",
    "duration_s": "duration, s",
    "request_throughput": "requests/s",
    "input_throughput": "input tokens/s",
    "output_throughput": "output tokens/s",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "cached_tokens": "cached tokens",
    "hit_rate_percent": "cache hit rate, % of input tokens",
    "tokens_per_chunk": "output tokens per chunk",
    "max_start_lag_ms": "latest start after arrival, ms",
    "client_cpu_percent": "CPU of the load generator, % of a core",
}


def latencies(replies: Sequence[Reply]) -> dict[str, list[float]]:
    """Milliseconds of each kind over the requests that completed.

    TTFT: from sending to the first chunk with tokens. ITL: between two chunks with tokens, one value per gap. TPOT, per request:
    from the first to the last such chunk, over the tokens after the first. E2E: from sending to the end of the stream.
    """
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for reply in replies:
        first, last = reply.token_times[0], reply.token_times[-1]
        found["ttft_ms"].append(1e3 * (first - reply.start))
        found["itl_ms"] += [1e3 * (after - before) for before, after in pairwise(reply.token_times)]
        found["e2e_ms"].append(1e3 * (reply.end - reply.start))
        if (later := reply.output_tokens - reply.first_tokens) > 0:
            found["tpot_ms"].append(1e3 * (last - first) / later)
    return found


def summarize(run: Run) -> dict[str, Any]:
    """All metrics. Rates and latencies are of completed requests; the duration includes the failed ones."""
    good = [reply for reply in run.replies if reply.error is None]
    errors = Counter(reply.error for reply in run.replies if reply.error is not None)
    inputs, outputs = sum(reply.prompt_tokens for reply in good), sum(reply.output_tokens for reply in good)
    cached = _total(reply.cached_tokens for reply in good)
    chunks = sum(len(reply.token_times) for reply in good)
    return {
        "completed": len(good),
        "failed": len(run.replies) - len(good),
        "errors": dict(errors),
        "error_examples": {reply.error: reply.message for reply in reversed(run.replies) if reply.error is not None},
        "short_outputs": sum(reply.output_tokens < reply.wanted for reply in good),
        "output_tokens_counted_by_server": all(reply.counted for reply in good),
        "duration_s": run.duration,
        "request_throughput": len(good) / run.duration,
        "input_throughput": inputs / run.duration,
        "output_throughput": outputs / run.duration,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": cached,
        "hit_rate_percent": None if cached is None or not inputs else 100 * cached / inputs,
        "tokens_per_chunk": outputs / chunks if chunks else None,
        "max_start_lag_ms": None if run.late is None else 1e3 * run.late,
        "client_cpu_percent": 100 * run.client_cpu / run.duration,
        **{name: spread(values) for name, values in latencies(good).items()},
    }


def _total(values: Any) -> int | None:
    """The sum; None if any value is unknown or there is none."""
    known = list(values)
    return None if not known or None in known else sum(known)


def rows(summary: dict[str, Any]) -> list[list[str]]:
    """The table."""
    lines = []
    for name, label in COUNTS.items():
        if name == "output_tokens" and not summary["output_tokens_counted_by_server"]:
            label += " (at least: chunks counted)"
        lines.append([label, number(summary[name]), "", "", ""])
        if name == "failed":
            lines += [[f"  {kind}", number(count), "", "", ""] for kind, count in sorted(summary["errors"].items())]
    for name, label in LATENCIES.items():
        values = summary[name] or {}
        lines.append([label, *(number(values.get(column)) for column in ("mean", "p50", "p90", "p99"))])
    return lines
