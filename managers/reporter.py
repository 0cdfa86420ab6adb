"""Reporter: what /metrics shows of a scheduler, put together once a second on the loop's own thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..mem_cache.radix_cache import RadixCache
from .io_struct import SchedulerReport
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two reports
STUCK = 30.0  # seconds without an admission after which a waiting queue is warned of
WARN_INTERVAL = 60.0


class Reporter:
    """``turn`` is called in every turn of the loop and costs one reading of the clock, except once a second."""

    def __init__(
        self, scheduler: Scheduler, send: Callable[[SchedulerReport], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._send = send
        self._clock = clock
        self._due = self._admitted_at = self._reported = clock()
        self._num_admissions = 0
        self._old = (0, 0, 0)  # prompt tokens computed, prompt tokens found, output tokens, as of the last report
        self._hit_rate = 0.0
        self._warned = float("-inf")

    def turn(self) -> None:
        """Report if it is time."""
        now = self._clock()
        if now >= self._due:
            self._due = now + INTERVAL
            self._send(SchedulerReport(gauges=self._gauges(now), counters=self._counters()))

    def _gauges(self, now: float) -> dict[str, float]:
        scheduler, memory = self._scheduler, self._scheduler.memory
        loads, cache, allocator = scheduler.loads(), memory.cache, memory.allocator
        table, running = memory.table, scheduler.running
        retracted = sum(1 for req in scheduler.waiting.unordered() if req.num_retractions)
        return {
            "num_running_reqs": loads.num_running,
            "num_queue_reqs": loads.num_waiting,
            "num_pending_tokens": loads.num_pending_tokens,
            "num_used_tokens": loads.num_used_tokens,
            "token_usage": loads.token_usage,
            "full_token_usage": loads.token_usage,
            "max_total_num_tokens": loads.num_tokens,
            "kv_available_tokens": allocator.available,
            "kv_evictable_tokens": cache.evictable_size,
            "kv_used_tokens": loads.num_tokens - allocator.available,
            "num_cached_tokens": cache.evictable_size + cache.protected_size,
            "page_size": allocator.page_size,
            "num_pages": loads.num_tokens // allocator.page_size,
            "new_token_ratio": scheduler.ratio.value,
            "utilization": loads.num_running / max(len(table.reqs) - 1, 1),
            "decode_sum_seq_lens": float(table.launched_lens[running].sum()),
            "num_paused_reqs": loads.num_running if scheduler.gate.paused else 0,
            "num_retracted_reqs": retracted,
            "weights_released": float("weights" in scheduler.gate.released),
            "memory_released": float(bool(scheduler.gate.released)),
            "is_cuda_graph": float(scheduler.stats.log.decode_graph),
            "queue_stuck_seconds": self._stuck(now),
            **self._rates(now),
            **{f"weight_load_seconds {source}": seconds for source, seconds in scheduler.stats.weight_loads.items()},
        }

    def _rates(self, now: float) -> dict[str, float]:
        """Over the time since the last report; the share of prompt tokens that were cached stays while no prompt comes."""
        stats = self._scheduler.stats
        new = (stats.num_prefill_tokens, stats.num_cached_tokens, stats.num_decode_tokens)
        computed, cached, decoded = (after - before for before, after in zip(self._old, new, strict=True))
        elapsed, self._reported, self._old = max(now - self._reported, 1e-9), now, new
        if computed + cached:
            self._hit_rate = cached / (computed + cached)
        return {"cache_hit_rate": self._hit_rate, "gen_throughput": decoded / elapsed}

    def _counters(self) -> dict[str, float]:
        stats, cache = self._scheduler.stats, self._scheduler.memory.cache
        retracted_prompts, retracted_outputs = stats.retracted_tokens
        own = {
            "num_prefill_tokens": stats.num_prefill_tokens,
            "num_cached_prompt_tokens": stats.num_cached_tokens,
            "num_decode_tokens": stats.num_decode_tokens,
            "num_prefill_steps": stats.num_prefill_steps,
            "num_decode_steps": stats.num_decode_steps,
            "num_retracted_requests": stats.num_retracted,
            "num_retracted_input_tokens": retracted_prompts,
            "num_retracted_output_tokens": retracted_outputs,
            "process_cpu_seconds": time.process_time(),
            "idle_seconds": stats.steps.idle_seconds,
            "num_refused": stats.num_refused,
            **{f"graph_passes_{mode}": count for mode, count in stats.steps.graph_passes.items()},
            **stats.steps.tokens.totals("step_tokens"),
            **stats.evictions.totals("eviction_seconds"),
            **{f"forward_seconds_{kind}": seconds for kind, seconds in stats.steps.seconds.items()},
        }
        if isinstance(cache, RadixCache):
            own |= {
                "cache_query_tokens": cache.query_tokens,
                "cache_hit_tokens": cache.hit_tokens,
                "evicted_tokens": cache.evicted_tokens,
            }
        return own

    def _stuck(self, now: float) -> float:
        """Seconds since anything was admitted while requests wait; warns when that is long."""
        scheduler = self._scheduler
        moved = scheduler.stats.num_prefill_steps != self._num_admissions
        if moved or not len(scheduler.waiting) or scheduler.gate.paused:
            self._num_admissions, self._admitted_at = scheduler.stats.num_prefill_steps, now
        stuck = now - self._admitted_at
        if stuck >= STUCK and now - self._warned >= WARN_INTERVAL:
            self._warned = now
            loads = scheduler.loads()
            logger.warning(
                "Stuck head of queue: nothing was admitted for %.0f s; #queue-req: %d, #running-req: %d, token usage: %.2f",
                *(stuck, loads.num_waiting, loads.num_running, loads.token_usage),
            )
        return stuck
