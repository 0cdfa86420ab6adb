"""The five workloads that engines are compared on: token ids drawn from a seed, greedy, end-of-sequence ignored.

W1  one request, 128 prompt and 128 new tokens
W2  64 requests at once, prompts of 32 to 256, outputs of 32 to 128 tokens
W3  64 requests at once that share 1,024 tokens and have 32 of their own, 32 new tokens
W4  8 conversations at once of 5 turns, 64 tokens in and 64 out a turn
W5  a prompt of 4,096 tokens arrives while 4 streams decode

Each returns seconds by the name of what was measured, and the outputs of W1 for a comparison of ids.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
from http_load import Client, Reply, Run, run_sessions
from workloads import Session, Turn

WARM_TOKENS = 8  # of each stream before the long prompt arrives
STREAMS, STREAM_TOKENS, LONG_PROMPT = 4, 1024, 4096


class WorkloadFailed(Exception):
    """A request of a measured load failed, so its numbers mean nothing."""


@dataclass(slots=True)
class Figures:
    """What a workload came to."""

    seconds: dict[str, float]
    outputs: list[list[int]] = field(default_factory=list)


class Source:
    """Draws token ids below the vocabulary's size."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def ids(self, count: int) -> list[int]:
        drawn: list[int] = self.rng.integers(16, self._vocab_size, count).tolist()
        return drawn

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high, endpoint=True))


Workload = Callable[[Client, Source], Awaitable[Figures]]


async def warm_up(client: Client, source: Source) -> None:
    """Two prompts of usual lengths, alone and together, that no workload uses."""
    await _load(client, [[Turn(source.ids(200), 8)]])
    await _load(client, [[Turn(source.ids(40), 8)] for _ in range(4)])


async def one_request(client: Client, source: Source) -> Figures:
    """W1, three times; the medians."""
    replies = [(await _load(client, [[Turn(source.ids(128), 128)]])).replies[0] for _ in range(3)]
    return Figures(
        {
            "W1 time per token": statistics.median(_time_per_token(reply) for reply in replies),
            "W1 time to first token": statistics.median(_first(reply) for reply in replies),
        },
        [reply.output_ids for reply in replies],
    )


async def many_at_once(client: Client, source: Source) -> Figures:
    """W2."""
    run = await _load(client, [[Turn(source.ids(source.between(32, 256)), source.between(32, 128))] for _ in range(64)])
    return Figures({"W2 total": run.duration})


async def shared_prefix(client: Client, source: Source) -> Figures:
    """W3."""
    shared = source.ids(1024)
    run = await _load(client, [[Turn(shared + source.ids(32), 32)] for _ in range(64)])
    return Figures({"W3 total": run.duration})


async def conversations(client: Client, source: Source) -> Figures:
    """W4."""
    run = await _load(client, [[Turn(source.ids(64), 64) for _ in range(5)] for _ in range(8)], needs_ids=True)
    first, last = run.replies[::5], run.replies[4::5]
    return Figures(
        {
            "W4 total": run.duration,
            "W4 first token, turn 1": statistics.median(map(_first, first)),
            "W4 first token, turn 5": statistics.median(map(_first, last)),
        }
    )


async def long_prompt_beside_streams(client: Client, source: Source) -> Figures:
    """W5: the worst gap between two events of a stream from the long prompt's arrival to a second after its first token."""
    replies = [Reply(wanted=STREAM_TOKENS) for _ in range(STREAMS)]
    tasks = [asyncio.create_task(client.send(source.ids(64), STREAM_TOKENS, reply)) for reply in replies]
    try:
        while min(len(reply.token_times) for reply in replies) < WARM_TOKENS:
            if any(task.done() for task in tasks):
                raise WorkloadFailed(f"a stream ended early: {[reply.error for reply in replies]}")
            await asyncio.sleep(0.005)
        prompt = _checked(await client.send(source.ids(LONG_PROMPT), 2))
        await asyncio.sleep(1.0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    end = prompt.token_times[0] + 1.0
    gaps = [
        after - before
        for reply in replies
        for before, after in zip(reply.token_times, [*reply.token_times[1:], end], strict=True)
        if after >= prompt.start and before <= end
    ]
    return Figures({"W5 worst gap": max(gaps), "W5 first token of the prompt": _first(prompt)})


WORKLOADS: dict[str, Workload] = {
    "W1": one_request,
    "W2": many_at_once,
    "W3": shared_prefix,
    "W4": conversations,
    "W5": long_prompt_beside_streams,
}

FIGURES = {  # what each comes to, in the order of tables
    "W1": ("W1 time per token", "W1 time to first token"),
    "W2": ("W2 total",),
    "W3": ("W3 total",),
    "W4": ("W4 total", "W4 first token, turn 1", "W4 first token, turn 5"),
    "W5": ("W5 worst gap", "W5 first token of the prompt"),
}


async def _load(client: Client, sessions: list[Session], *, needs_ids: bool = False) -> Run:
    run = await run_sessions(client, sessions, np.zeros(len(sessions)), max_concurrency=None, needs_ids=needs_ids)
    for reply in run.replies:
        _checked(reply)
    return run


def _checked(reply: Reply) -> Reply:
    if reply.error is not None or not reply.token_times:
        raise WorkloadFailed(f"{reply.error}: {reply.message}")
    if reply.counted and reply.output_tokens != reply.wanted:
        raise WorkloadFailed(f"{reply.output_tokens} tokens came, {reply.wanted} were asked for")
    return reply


def _first(reply: Reply) -> float:
    return reply.token_times[0] - reply.start


def _time_per_token(reply: Reply) -> float:
    return (reply.token_times[-1] - reply.token_times[0]) / (reply.output_tokens - reply.first_tokens)
