"""Control: takes messages in, and answers those that are not requests for text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from .cache_control import CacheControl
from .config import SchedulerConfig
from .constrained.constraint import Constraint, GrammarStore
from .constrained.thinking import Thinking
from .errors import RequestError
from .inbox import Inbox
from .invariants import breaches, check_memory
from .io_struct import (
    AbortReq,
    CacheReportReq,
    ContinueReq,
    ControlReply,
    DropGrammarReq,
    ExplainCacheReq,
    FinishReason,
    FlushCacheReq,
    GenerateReq,
    InternalStateReq,
    LastTurnsReq,
    LoadGrammarReq,
    MemoryReq,
    PauseReq,
    ProfileReq,
    ReadWeightReq,
    ReleaseHoldReq,
    SetPace,
    ShutdownReq,
    Tick,
    ToScheduler,
    UpdateWeightsReq,
    WeightsGroupReq,
)
from .pace import PrefillPace
from .quiesce import Quiesce
from .req import Req
from .runner_control import RunnerControl
from .scheduler import Scheduler
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_WAIT = 1.0  # seconds of sleep at a time when there is nothing to do
TICK_INTERVAL = 0.05  # seconds between two ticks, unless something is due
ABORTED = FinishReason(kind="abort", message="Abort by client request.")


class Control:
    """Its ``receive`` starts every turn of the loop. No message can end the process: one that fails, fails alone."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox,
        reply: Callable[[ControlReply], None],
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        tap: Callable[[list[ToScheduler]], list[ToScheduler]] = lambda messages: messages,
        last_turns: Callable[[], list[str]] = list,
    ) -> None:
        """The scheduler's time starts at 0 now; ``clock`` gives seconds. tap: says what is taken in, given what has arrived.

        last_turns: their records, for whoever asks.
        """
        self.shutdown = False
        self._scheduler = scheduler
        self._inbox = inbox
        self._reply = reply
        self._tokenizer = tokenizer
        self._config = config
        self._tap = tap
        begin = clock()
        self._clock: Callable[[], float] = lambda: clock() - begin
        self._ticked = float("-inf")  # the time of the newest tick
        self._quiesce = Quiesce(scheduler, reply)
        self._pace = _make_pace(scheduler, config)
        self._num_received = 0
        self._checked = False  # memory was checked since the last request ended
        cache = CacheControl(scheduler.memory.cache, reply, config.weight_version)
        self._runner = RunnerControl(scheduler, reply, self._quiesce, cache, config.weight_version)
        self._handlers: dict[type, Callable[[Any], None]] = {
            GenerateReq: self._generate,
            AbortReq: self._abort,
            LoadGrammarReq: self._load_grammar,
            DropGrammarReq: self._drop_grammar,
            ReleaseHoldReq: self._release_hold,
            FlushCacheReq: self._quiesce.flush,
            PauseReq: self._quiesce.pause,
            ContinueReq: self._runner.resume,
            UpdateWeightsReq: self._runner.update,
            ReadWeightReq: self._runner.read,
            WeightsGroupReq: self._runner.group,
            MemoryReq: self._runner.memory,
            ProfileReq: self._runner.profile,
            InternalStateReq: self._internal_state,
            LastTurnsReq: lambda message: reply(ControlReply(call_id=message.call_id, state={"turns": last_turns()})),
            CacheReportReq: cache.report,
            ExplainCacheReq: cache.explain,
            ShutdownReq: self._shutdown,
            SetPace: self._set_pace,
            Tick: self._tick,
        }

    def receive(self, in_flight: bool) -> None:
        """Take in what has arrived. With nothing to do, first check the books and sleep until something arrives or is due."""
        self._quiesce.serve(in_flight=in_flight)
        self._runner.serve(in_flight=in_flight)
        if not in_flight and self._scheduler.is_resting():
            self._rest()
        for message in self._tap(self._inbox.take(self._own_messages)):
            self._handlers[type(message)](message)
        self._quiesce.serve(in_flight=in_flight)
        self._runner.serve(in_flight=in_flight)

    def _rest(self) -> None:
        if self._scheduler.is_idle():
            self._on_idle()
        begin = time.monotonic()
        self._inbox.wait(max(min(IDLE_WAIT, self._next_due() - self._now()), 0.0))
        self._scheduler.stats.steps.idle_seconds += time.monotonic() - begin

    def _own_messages(self) -> list[ToScheduler]:
        """What this rank has to say itself: a tick if one is due, a new pace."""
        now = self._now()
        own: list[ToScheduler] = []
        if now >= min(self._ticked + TICK_INTERVAL, self._next_due()):
            self._ticked = now
            own.append(Tick(now=now))
        chunk = self._pace.news() if self._pace else None
        if chunk is not None:
            own.append(SetPace(chunk=chunk))
        return own

    def _now(self) -> float:
        return self._clock()

    def _next_due(self) -> float:
        return min(self._scheduler.gate.timers.next_due(), self._quiesce.next_due())

    def _tick(self, message: Tick) -> None:
        self._scheduler.tick(message.now)

    def _set_pace(self, message: SetPace) -> None:
        self._scheduler.planner.limits.shared_chunk = message.chunk

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
                message, arrival=self._num_received, weight_version=self._runner.weight_version, tokenizer=self._tokenizer
            )
            req.constraint = self._constraint(message)
        except Exception as error:
            logger.exception("request %s could not be queued", message.rid)
            self._refuse(message, error)
            return
        message.input_embeds = b""  # the records of the last turns need not keep it
        self._scheduler.add(req)

    def _constraint(self, message: GenerateReq) -> Constraint | None:
        """Where a request starts in its grammar, or in a thinking part that has a budget; None if nothing binds it."""
        thinking = None
        if message.thinking is not None:
            table = self._tokenizer.byte_table
            if table is None:
                raise RequestError("Thinking cannot be followed with this model's tokenizer: its tokens do not stand for bytes.")
            thinking = Thinking(message.thinking, table.tokens.__getitem__)
        if message.grammar_key:
            return self._store().constraint(message.grammar_key, thinking)
        bounded = message.thinking is not None and message.thinking.budget is not None
        return Constraint(None, (), thinking) if bounded else None

    def _refuse(self, message: GenerateReq, error: Exception) -> None:
        reason = FinishReason(
            kind="abort", message=f"The request could not be queued: {error}", status_code=500, err_type="InternalServerError"
        )
        self._scheduler.outputs.refuse(message, reason)

    def _abort(self, message: AbortReq) -> None:
        rids = list(self._scheduler.live) if message.abort_all else [message.rid]
        for rid in rids:
            self._scheduler.abort(rid, ABORTED)

    def _store(self) -> GrammarStore:
        grammars = self._scheduler.masks.grammars
        if grammars is None:
            raise RuntimeError("this scheduler has no grammars")
        return grammars

    def _load_grammar(self, message: LoadGrammarReq) -> None:
        self._store().load(message)

    def _drop_grammar(self, message: DropGrammarReq) -> None:
        grammars = self._scheduler.masks.grammars
        if grammars is not None:
            grammars.drop(message.key)

    def _release_hold(self, message: ReleaseHoldReq) -> None:
        self._scheduler.memory.holds.release(message.session)

    def _internal_state(self, message: InternalStateReq) -> None:
        self._reply(ControlReply(call_id=message.call_id, state=state_of(self._scheduler)))

    def _shutdown(self, message: ShutdownReq) -> None:
        self.shutdown = True


def _make_pace(scheduler: Scheduler, config: SchedulerConfig) -> PrefillPace | None:
    """The pace that keeps config.target_itl_ms, fed by the steps of the scheduler."""
    if not config.target_itl_ms:
        return None
    limits = scheduler.planner.limits
    max_chunk = limits.chunked_prefill_size or limits.max_prefill_tokens
    page_size = scheduler.memory.allocator.page_size
    pace = PrefillPace(config.target_itl_ms / 1e3, max_chunk=max_chunk, page_size=page_size, slack=config.target_itl_slack)
    scheduler.stats.on_step = pace.observe
    return pace


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    """Loads and counters, for /server_info."""
    cache, stats, loads = scheduler.memory.cache, scheduler.stats, scheduler.loads()
    return {
        "num_running_reqs": loads.num_running,
        "num_waiting_reqs": loads.num_waiting,
        "num_used_tokens": loads.num_used_tokens,
        "num_cached_tokens": cache.evictable_size + cache.protected_size,
        "num_session_held_tokens": scheduler.memory.holds.num_tokens,
        "num_pinned_tokens": scheduler.memory.pins.num_tokens,
        "max_total_num_tokens": loads.num_tokens,
        "token_usage": round(loads.token_usage, 4),
        "new_token_ratio": round(scheduler.ratio.value, 4),
        "last_gen_throughput": round(stats.log.gen_throughput, 2),
        "num_prefill_tokens": stats.num_prefill_tokens,
        "num_cached_prompt_tokens": stats.num_cached_tokens,
        "num_decode_tokens": stats.num_decode_tokens,
        "num_retracted": stats.num_retracted,
        "num_aborted": stats.num_aborted,
        "num_refused": stats.num_refused,
        "paused": scheduler.gate.paused,
        "memory_balanced": not breaches(scheduler.memory),
    }
