"""The scheduler's answers to questions about its prefix cache, and their texts on the tokenizer manager's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from ..mem_cache.cache_report import explain, hottest
from ..mem_cache.prefix_cache import CacheKey, PrefixCache
from ..mem_cache.radix_cache import RadixCache
from .io_struct import CacheReportReq, ControlReply, ExplainCacheReq, unpack_ids

HEAD_CHARS, TAIL_CHARS = 80, 200
MAX_IDS = 8  # shown at a departure
CACHE_OFF = "The prefix cache is off (--disable-radix-cache)."


class CacheControl:
    """Answers CacheReportReq and ExplainCacheReq. Changes nothing in the cache."""

    def __init__(self, cache: PrefixCache, reply: Callable[[ControlReply], None], weight_version: str) -> None:
        self._cache = cache
        self._reply = reply
        self.weight_version = weight_version

    def report(self, message: CacheReportReq) -> None:
        """Sizes, counters and the hottest prefixes."""
        self._reply(ControlReply(call_id=message.call_id, state=report_of(self._cache, message.k)))

    def explain(self, message: ExplainCacheReq) -> None:
        """What of a prompt would hit, and why not more."""
        token_ids = unpack_ids(message.input_ids)
        if isinstance(self._cache, RadixCache):
            key = CacheKey(weight_version=self.weight_version, extra_key=message.extra_key, cache_salt=message.cache_salt)
            state = asdict(explain(self._cache.tree, key, token_ids))
        else:
            state = {"num_tokens": len(token_ids), "would_hit": 0, "reason": CACHE_OFF, "nearest": None, "complete": True}
            state |= {"namespaces_seen": 0, "namespaces_better": 0}
        self._reply(ControlReply(call_id=message.call_id, state=state))


def report_of(cache: PrefixCache, k: int) -> dict[str, Any]:
    """Sizes in tokens; hit_rate is the share of the prompt tokens asked for that was found. ``hottest`` holds token ids."""
    report: dict[str, Any] = {
        "enabled": isinstance(cache, RadixCache),
        "size_tokens": cache.evictable_size + cache.protected_size,
        "evictable": cache.evictable_size,
        "protected": cache.protected_size,
        "page_size": cache.page_size,
    }
    tree = {
        "num_nodes": 0,
        "hit_rate": 0.0,
        "query_tokens": 0,
        "hit_tokens": 0,
        "evicted_tokens": 0,
        "hottest": [],
        "complete": True,
    }
    if isinstance(cache, RadixCache):
        prefixes, complete = hottest(cache.tree, k)
        tree = {
            "num_nodes": cache.num_nodes,
            "hit_rate": round(cache.hit_tokens / max(cache.query_tokens, 1), 4),
            "query_tokens": cache.query_tokens,
            "hit_tokens": cache.hit_tokens,
            "evicted_tokens": cache.evicted_tokens,
            "hottest": [asdict(prefix) for prefix in prefixes],
            "complete": complete,
        }
    return report | tree


class TextDecoder(Protocol):
    """What the texts need of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""


def with_texts(report: dict[str, Any], tokenizer: TextDecoder) -> dict[str, Any]:
    """A report for clients: of each prefix the first and the last characters instead of ids; null if they are not for everyone."""

    def text(ids: list[int] | None) -> str | None:
        return None if ids is None else tokenizer.decode(ids, skip_special_tokens=False)

    prefixes = []
    for prefix in report["hottest"]:
        first, last = text(prefix.pop("head")), text(prefix.pop("tail"))
        first, last = first and first[:HEAD_CHARS], last and last[-TAIL_CHARS:]
        prefixes.append({**prefix, "first_text": first, "last_text": last})
    return {**report, "hottest": prefixes}


def explanation_of(state: dict[str, Any], tokenizer: TextDecoder) -> dict[str, Any]:
    """An explanation for clients: the texts on both sides of the departure, and how many other namespaces would give more."""
    found = state["nearest"]
    namespaces = {"other_seen": state["namespaces_seen"], "would_hit_more": state["namespaces_better"]}
    nearest = None
    if found is not None:
        nearest = {
            "departs_at": found["at"],
            "prompt_text": tokenizer.decode(found["before"] + found["prompt"], skip_special_tokens=False),
            "cached_text": tokenizer.decode(found["before"] + found["cached"], skip_special_tokens=False),
            "prompt_token_ids": found["prompt"][:MAX_IDS],
            "cached_token_ids": found["cached"][:MAX_IDS],
            "agree_again": found["agree_again"],
            "prompt_extra": found["prompt_extra"],
            "cached_extra": found["cached_extra"],
        }
    told = {name: state[name] for name in ("num_tokens", "would_hit", "reason", "complete")}
    return {**told, "nearest": nearest, "namespaces": namespaces}
