"""Seeded traces for bench_policies: what requests share decides which policy suits them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

VOCAB = 32000
URGENT_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns of which each begins ``think`` seconds after the answer to the one before; turns[i] is what turn i adds to the prompt.

    A lone request is a conversation of one turn.
    """

    start: float
    turns: tuple[np.ndarray, ...]
    max_new_tokens: int
    key: str = ""  # routing key
    think: float = 0.0
    urgent: bool = False  # has a higher priority, which counts under the policy `priority` only


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Conversations and the engine that they meet."""

    name: str
    conversations: list[Conversation]
    num_slots: int
    max_running: int = 8

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


def _tokens(rng: np.random.Generator, low: int, high: int | None = None) -> np.ndarray:
    size = low if high is None else int(rng.integers(low, high + 1))
    return rng.integers(3, VOCAB, max(size, 1)).astype(np.int32)


def few_shot(seed: int, scale: float) -> Trace:
    """Five templates of about 1,200 tokens, each with many short questions, at random times; the pool holds three of them."""
    rng = np.random.default_rng(seed)
    templates = [_tokens(rng, int(1000 * scale), int(1400 * scale)) for _ in range(5)]
    asks = []
    for index in range(150):
        which = int(rng.integers(len(templates)))
        prompt = np.concatenate([templates[which], _tokens(rng, 20, 80)])
        start = float(rng.uniform(0, 40 * scale))
        asks.append(_ask(index, start, prompt, 16, f"template-{which}"))
    return Trace(name="few-shot", conversations=asks, num_slots=_slots(4700 * scale + 300))


def chat(seed: int, scale: float) -> Trace:
    """Eight conversations of five turns over one system prompt; everything fits."""
    rng = np.random.default_rng(seed)
    system = _tokens(rng, int(400 * scale))
    conversations = []
    for index in range(8):
        turns = [_tokens(rng, int(100 * scale), int(300 * scale)) for _ in range(5)]
        turns[0] = np.concatenate([system, turns[0]])
        start, think = float(rng.uniform(0, 4)), float(rng.uniform(1, 5))
        conversations.append(
            Conversation(start=start, turns=tuple(turns), max_new_tokens=48, think=think, key=f"chat-{index}", urgent=index == 0)
        )
    return Trace(name="chat", conversations=conversations, num_slots=_slots(18_000 * scale + 2000))


def rag(seed: int, scale: float) -> Trace:
    """Six documents of about 8,000 tokens, twenty questions to each in random order; the pool holds two documents."""
    rng = np.random.default_rng(seed)
    documents = [_tokens(rng, int(7500 * scale), int(8500 * scale)) for _ in range(6)]
    asks = []
    for index, which in enumerate(rng.permutation(np.repeat(np.arange(6), 20)).tolist()):
        prompt = np.concatenate([documents[which], _tokens(rng, 20, 60)])
        asks.append(_ask(index, index * 0.25 * scale, prompt, 16, f"document-{which}"))
    return Trace(name="rag", conversations=asks, num_slots=_slots(19_400 * scale + 600))


def unrelated(seed: int, scale: float) -> Trace:
    """Prompts of 20 to 1,500 tokens that share nothing."""
    rng = np.random.default_rng(seed)
    asks = [
        _ask(index, float(rng.uniform(0, 60 * scale)), _tokens(rng, 20, int(1500 * scale)), int(rng.integers(8, 65)), "")
        for index in range(100)
    ]
    return Trace(name="random", conversations=asks, num_slots=_slots(15_400 * scale + 600))


def _ask(index: int, start: float, prompt: np.ndarray, max_new_tokens: int, key: str) -> Conversation:
    urgent = index % URGENT_EVERY == URGENT_EVERY - 1
    return Conversation(start=start, turns=(prompt,), max_new_tokens=max_new_tokens, key=key, urgent=urgent)


def _slots(size: float) -> int:
    """Whole pages. What is added above is for questions and answers, whose lengths do not scale."""
    return max(int(size) // 64, 8) * 64


TRACES: dict[str, Callable[[int, float], Trace]] = {"few-shot": few_shot, "chat": chat, "rag": rag, "random": unrelated}
