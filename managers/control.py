"""Control: takes messages in, and answers those that are not requests for text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .cache_control import CacheControl
from .config import SchedulerConfig
from .invariants import breaches, check_memory
from .io_struct import (
    AbortReq,
    CacheReportReq,
    ControlReply,
    ExplainCacheReq,
    FinishReason,
    FlushCacheReq,
    GenerateReq,
    InternalStateReq,
    ReleaseHoldReq,
    ShutdownReq,
    ToScheduler,
)
from .ipc import Receiver
from .req import Req
from .scheduler import Scheduler
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_WAIT = 1.0  # seconds of sleep at a time when there is nothing to do
ABORTED = FinishReason(kind="abort", message="Abort by client request.")


class Control:
    """Its ``receive`` starts every turn of the loop. No message can end the process: one that fails, fails alone."""

    def __init__(
        self,
        scheduler: Scheduler,
        receiver: Receiver[ToScheduler],
        reply: Callable[[ControlReply], None],
        tokenizer: Tokenizer,
        config: SchedulerConfig,
    ) -> None:
        self.shutdown = False
        self._scheduler = scheduler
        self._receiver = receiver
        self._reply = reply
        self._tokenizer = tokenizer
        self._config = config
        self._num_received = 0
        self._checked = False  # memory was checked since the last request ended
        cache = CacheControl(scheduler.memory.cache, reply, config.weight_version)
        self._handlers: dict[type, Callable[[Any], None]] = {
            GenerateReq: self._generate,
            AbortReq: self._abort,
            ReleaseHoldReq: self._release_hold,
            FlushCacheReq: self._flush_cache,
            InternalStateReq: self._internal_state,
            CacheReportReq: cache.report,
            ExplainCacheReq: cache.explain,
            ShutdownReq: self._shutdown,
        }

    def receive(self, idle: bool) -> None:
        """Take in what has arrived; when idle, first check the books and sleep until something arrives."""
        if idle:
            self._on_idle()
            self._receiver.wait(IDLE_WAIT)
        for message in self._receiver.receive_all():
            self._handlers[type(message)](message)

    def _on_idle(self) -> None:
        if self._checked:
            return
        self._checked = True
        self._scheduler.ratio.reset()
        check_memory(self._scheduler.memory, strict=self._config.strict)

    def _generate(self, message: GenerateReq) -> None:
        self._checked = False
        self._num_received += 1
        if message.rid in self._scheduler.live:
            logger.error("request id %s is alive already; the second one is dropped", message.rid)
            return
        try:
            req = Req.from_message(
                message, arrival=self._num_received, weight_version=self._config.weight_version, tokenizer=self._tokenizer
            )
        except Exception as error:
            logger.exception("request %s could not be queued", message.rid)
            self._refuse(message, error)
            return
        self._scheduler.add(req)

    def _refuse(self, message: GenerateReq, error: Exception) -> None:
        reason = FinishReason(
            kind="abort", message=f"The request could not be queued: {error}", status_code=500, err_type="InternalServerError"
        )
        self._scheduler.outputs.refuse(message, reason)

    def _abort(self, message: AbortReq) -> None:
        rids = list(self._scheduler.live) if message.abort_all else [message.rid]
        for rid in rids:
            self._scheduler.abort(rid, ABORTED)

    def _flush_cache(self, message: FlushCacheReq) -> None:
        scheduler = self._scheduler
        if not scheduler.is_idle():
            loads = scheduler.loads()
            text = f"Flush cache failed: {loads.num_running} requests run and {loads.num_waiting} wait."
            self._reply(ControlReply(call_id=message.call_id, success=False, message=text))
            return
        num_held = scheduler.memory.holds.clear()
        scheduler.memory.cache.reset()
        text = f"Cache flushed; {num_held} sessions lost what they held." if num_held else "Cache flushed."
        self._reply(ControlReply(call_id=message.call_id, message=text))

    def _release_hold(self, message: ReleaseHoldReq) -> None:
        self._scheduler.memory.holds.release(message.session)

    def _internal_state(self, message: InternalStateReq) -> None:
        self._reply(ControlReply(call_id=message.call_id, state=state_of(self._scheduler)))

    def _shutdown(self, message: ShutdownReq) -> None:
        self.shutdown = True


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    """Loads and counters, for /server_info."""
    cache, stats, loads = scheduler.memory.cache, scheduler.stats, scheduler.loads()
    return {
        "num_running_reqs": loads.num_running,
        "num_waiting_reqs": loads.num_waiting,
        "num_used_tokens": loads.num_used_tokens,
        "num_cached_tokens": cache.evictable_size + cache.protected_size,
        "num_session_held_tokens": scheduler.memory.holds.num_tokens,
        "max_total_num_tokens": loads.num_tokens,
        "token_usage": round(loads.token_usage, 4),
        "new_token_ratio": round(scheduler.ratio.value, 4),
        "last_gen_throughput": round(stats.gen_throughput, 2),
        "num_prefill_tokens": stats.num_prefill_tokens,
        "num_cached_prompt_tokens": stats.num_cached_tokens,
        "num_decode_tokens": stats.num_decode_tokens,
        "num_retracted": stats.num_retracted,
        "num_aborted": stats.num_aborted,
        "memory_balanced": not breaches(scheduler.memory),
    }
