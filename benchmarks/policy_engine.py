"""The traces of bench_policies on a real engine, in wall time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from policy_traces import Conversation, Trace

import banyan

URGENT = 20


def measure(
    model: str, traces: Sequence[Trace], policies: Sequence[str], options: dict[str, Any], *, no_cache: str
) -> dict[str, dict[str, dict[str, float | None]]]:
    """trace -> policy -> what it shows; one engine per run, its pool as the trace says."""
    results: dict[str, dict[str, dict[str, float | None]]] = {trace.name: {} for trace in traces}
    for trace, policy in itertools.product(traces, policies):
        cached = policy != no_cache
        engine_options = {
            **options,
            "model_path": model,
            "log_level": "error",
            "max_total_tokens": trace.num_slots,
            "max_running_requests": trace.max_running,
            "schedule_policy": policy if cached else "fcfs",
            "disable_radix_cache": not cached,
        }
        with banyan.Engine(**engine_options) as engine:
            vocab_size = engine.get_server_info()["scheduler_info"]["model"]["vocab_size"]
            engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2})
            engine.flush_cache(timeout=10.0)
            rows = asyncio.run(_play(engine, trace, vocab_size))
        results[trace.name][policy] = _summary(rows)
    return results


async def _play(engine: banyan.Engine, trace: Trace, vocab_size: int) -> list[dict[str, Any]]:
    start = time.perf_counter()
    done = await asyncio.gather(*(_converse(engine, item, start, vocab_size) for item in trace.conversations))
    return list(itertools.chain.from_iterable(done))


async def _converse(engine: banyan.Engine, conversation: Conversation, start: float, vocab_size: int) -> list[dict[str, Any]]:
    await asyncio.sleep(max(start + conversation.start - time.perf_counter(), 0.0))
    prompt: list[int] = []
    rows = []
    for turn, added in enumerate(conversation.turns):
        if turn:
            await asyncio.sleep(conversation.think)
        prompt += (added % np.int32(vocab_size)).tolist()
        row, answer = await _ask(engine, conversation, prompt)
        rows.append({**row, "turn": turn, "urgent": conversation.urgent})
        prompt += answer
    return rows


async def _ask(engine: banyan.Engine, conversation: Conversation, prompt: list[int]) -> tuple[dict[str, Any], list[int]]:
    """(what was measured of one request, its output)."""
    arrived, first = time.perf_counter(), None
    last: dict[str, Any] | None = None
    params = {"max_new_tokens": conversation.max_new_tokens, "temperature": 0, "ignore_eos": True}
    stream = await engine.async_generate(
        input_ids=prompt,
        sampling_params=params,
        stream=True,
        priority=URGENT if conversation.urgent else 0,
        routing_key=conversation.key or None,
    )
    async for chunk in stream:  # type: ignore[union-attr]
        last, first = chunk, first or time.perf_counter()
    if last is None or first is None:
        raise RuntimeError("the request has no output")
    meta = last["meta_info"]
    row = {
        "arrived": arrived,
        "end": time.perf_counter(),
        "ttft": first - arrived,
        "prompt": meta["prompt_tokens"],
        "cached": meta["cached_tokens"],
        "output": meta["completion_tokens"],
    }
    return row, list(last["output_ids"])


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    ttfts = np.array([row["ttft"] for row in rows])
    urgent = [row["ttft"] for row in rows if row["urgent"]]
    span = max(row["end"] for row in rows) - min(row["arrived"] for row in rows)
    turns = range(max(row["turn"] for row in rows) + 1)
    return {
        "reused": sum(row["cached"] for row in rows) / sum(row["prompt"] for row in rows),
        "ttft_p50": float(np.percentile(ttfts, 50)),
        "ttft_p99": float(np.percentile(ttfts, 99)),
        "urgent_ttft_p50": float(np.median(urgent)) if urgent else None,
        "output_throughput": sum(row["output"] for row in rows) / span,
        **{f"turn_{turn + 1}_ttft_p50": float(np.median([row["ttft"] for row in rows if row["turn"] == turn])) for turn in turns},
    }
