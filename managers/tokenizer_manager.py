"""TokenizerManager: the front of the engine. Requests in, checked and tokenised, to the scheduler; text back to who asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import traceback
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from .cache_control import explanation_of, with_texts
from .config import SchedulerInfo, TokenizerManagerConfig
from .constrained.service import GrammarService
from .control_calls import ControlCalls
from .deadlines import OWN, REASONS
from .errors import EngineDeadError, RequestError
from .generate_json import GenerateFormat
from .generation import GenerateInput, Generation, Output, output_of_row, unstarted_output
from .io_struct import (
    AbortReq,
    CacheReportReq,
    ContinueReq,
    ControlReply,
    ExplainCacheReq,
    FinishReason,
    FlushCacheReq,
    GenerateReq,
    Heartbeat,
    InternalStateReq,
    LastTurnsReq,
    Message,
    PauseReq,
    TextOutput,
    Timings,
    ToTokenizer,
    unpack_ids,
)
from .link import Link
from .logprobs.logprob_json import TokenTexts
from .processes.health import Health, HealthMonitor
from .processes.life import Life
from .processes.recovery import Recovery
from .request_context import current_context
from .request_gate import QUEUE_FULL_MESSAGE, max_live_requests
from .request_log import TEXTS, RequestLog
from .request_plan import RequestPlan
from .request_size import is_batch
from .request_stats import RequestStats
from .request_table import Choice, RequestTable
from .request_track import RequestWatch, Watcher
from .request_validator import RequestValidator, TextEncoder
from .scored_generation import generation_of
from .sessions.service import SessionService
from .sessions.sessions import OpenSession
from .tokenizer import Tokenizer

T = TypeVar("T")

MAX_TOKENIZE_THREADS = 4
IDLE_POLL = 0.02  # seconds
DIED = FinishReason(kind="abort", message="The engine has died.", status_code=503, err_type="EngineDeadError")


class TokenizerManager:
    """Lives on one asyncio loop, on which ``start_loop`` is called first. Only ``fail`` and ``health`` are for any thread."""

    def __init__(self, config: TokenizerManagerConfig, info: SchedulerInfo, tokenizer: TextEncoder | None = None) -> None:
        """``tokenizer`` None: load the one of config.tokenizer_path."""
        self.config = config
        self.info = info
        self.draining = False  # new requests get a 503
        self.tokenizer: Any = Tokenizer.load(config.tokenizer_path) if tokenizer is None else tokenizer
        self._validator = RequestValidator(config, info, self.tokenizer)
        self._table = RequestTable()
        self._sessions = SessionService(config, abort=self._abort_rids, send=self._send)
        self._monitor = HealthMonitor()
        self._calls = ControlCalls(self._ask)
        stop_ids = getattr(self.tokenizer, "eos_token_ids", ())
        self.stats = RequestStats()
        self._grammars = GrammarService(
            config, info, tokenizer_stop_ids=stop_ids, calls=self._calls, send=self._send, stats=self.stats
        )
        self._pool = ThreadPoolExecutor(min(MAX_TOKENIZE_THREADS, os.cpu_count() or 1), thread_name_prefix="tokenize")
        self._link: Link | None = None
        self._life = Life()
        self.watch = _make_watch(config, self.stats)

    def start_loop(self) -> None:
        """Bind the receiving socket on the running loop."""
        self._monitor = HealthMonitor()
        self._link = Link(self.config.ipc, self._take, self._receive_ended)

    # --- requests -----------------------------------------------------------------------------------------------------------------

    async def start(self, request: GenerateInput, *, probe: bool = False) -> Generation:
        """Check, tokenise and send a request; nothing is sent before all of it is valid.

        A probe leaves nothing in the cache, and no metric or log tells of it. Raises RequestError that names the field,
        EngineDeadError after a death.
        """
        self._check_open()
        await self._life.wait()
        context = current_context()
        if context is not None:
            context.complete(request)
        plan = await self.in_pool(self._validator.plan, request) if is_batch(request) else self._validator.plan(request)
        self._check_room(plan)
        generation = generation_of(plan, self._abort_rids)
        self._table.add(plan, generation)
        try:
            self._sessions.begin(plan)
            messages = await asyncio.get_running_loop().run_in_executor(self._pool, self._validator.prepare, plan)
            await self._grammars.attach(messages)  # nothing may be awaited between this and sending
            self._check_open()
            self._sessions.commit(plan, messages)
        except BaseException:
            self._sessions.cancel(plan)
            for rid in plan.rids:
                self._table.remove(rid)
            raise
        messages = generation.begin(plan, messages)
        self._table.follow(generation.followers)
        for message in messages:
            message.probe = probe
            if (choice := self._table.get(message.rid)) is not None:
                choice.track.begin(message, plan.texts[choice.index // plan.n] if plan.texts else None, current_context())
            self._send_request(message)
        return generation

    def _send_request(self, message: GenerateReq) -> None:
        choice = self._table.get(message.rid)
        if choice is None:
            return
        reason = FinishReason(kind="abort", message="Aborted before it was scheduled.") if choice.aborted else None
        remaining = message.timeout
        if remaining is not None:  # it counts from the request's arrival here
            remaining -= time.monotonic() - choice.generation.created
            if remaining <= 0:
                reason = reason or REASONS[OWN]
        if reason is None:
            if self._link is not None:  # else it is sent when the processes are back
                choice.sent = True
                self._send(msgspec.structs.replace(message, timeout=remaining))
            return
        # Over before the prompt was tokenised: the scheduler never hears of it.
        self._deliver(message.rid, choice, unstarted_output(choice.index, len(unpack_ids(message.input_ids)), reason))

    async def generate(self, request: GenerateInput, *, probe: bool = False) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer as the JSON of the native /generate: a dict for a single prompt with n == 1, else a list."""
        return await self._format(await self.start(request, probe=probe), request).whole()

    def stream(self, generation: Generation, request: GenerateInput) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the native /generate. Closing the iterator early aborts; one never iterated needs ``generation.abort``."""
        incremental = self.config.incremental_streaming_output if request.incremental is None else request.incremental
        return self._format(generation, request).chunks(incremental=incremental)

    def _format(self, generation: Generation, request: GenerateInput) -> GenerateFormat:
        return GenerateFormat(
            generation,
            weight_version=self.config.weight_version,
            with_prompt_ids=request.return_prompt_token_ids,
            texts=TokenTexts(self.tokenizer) if request.return_text_in_logprobs else None,
        )

    def abort(self, rid: str, abort_all: bool = False) -> int:
        """Abort the request with exactly this rid, or the ones that a batch or n > 1 made of it; says how many choices that were.

        Their consumers get a finishing Output of kind "abort". Unknown rids are no error, an empty one is.
        """
        if not rid and not abort_all:
            raise RequestError("rid must not be empty, unless abort_all is true.", param="rid")
        rids = self._table.rids() if abort_all else self._table.find(rid)
        self._abort_rids(rids)
        return len(rids)

    def _abort_rids(self, rids: list[str]) -> None:
        for rid in rids:
            choice = self._table.get(rid)
            if choice is not None and not choice.aborted:
                choice.aborted = True
                if choice.sent:
                    self._send(AbortReq(rid=rid))

    # --- sessions -----------------------------------------------------------------------------------------------------------------

    async def open_session(self, request: OpenSession) -> str:
        """The id of a new session. Raises RequestError: the id exists, or (429) there are too many."""
        self._check_open()
        return self._sessions.open(request)

    async def close_session(self, session_id: str) -> None:
        """Forget a session, after the turns that are under way. Raises RequestError for an unknown id."""
        self._check_alive()
        self._sessions.close(session_id)

    # --- control ------------------------------------------------------------------------------------------------------------------

    async def flush_cache(self, timeout: float = 0.0) -> ControlReply:
        """Empty the prefix cache as soon as nothing runs or waits. success False: that was not within ``timeout`` seconds."""
        self._check_alive()
        return await self._calls.call(lambda call_id: FlushCacheReq(call_id=call_id, timeout=timeout))

    async def pause_generation(self, mode: str = "abort") -> ControlReply:
        """Begin no further step; returns when none is under way. Requests that come now are queued.

        mode: "abort" ends all requests, "retract" sends those that run back to the queue and frees their KV, "in_place" keeps it.
        """
        self._check_alive()
        return await self._calls.call(lambda call_id: PauseReq(call_id=call_id, mode=mode))

    async def continue_generation(self) -> ControlReply:
        """End a pause."""
        self._check_alive()
        return await self._calls.call(lambda call_id: ContinueReq(call_id=call_id))

    async def internal_state(self) -> dict[str, Any]:
        """The scheduler's state. Waits while a forward pass keeps the scheduler busy."""
        self._check_alive()
        return (await self._calls.call(lambda call_id: InternalStateReq(call_id=call_id))).state

    async def last_turns(self) -> list[str]:
        """Records of the scheduler's last turns, as a crash dump has them, a line each."""
        self._check_alive()
        turns: list[str] = (await self._calls.call(lambda call_id: LastTurnsReq(call_id=call_id))).state["turns"]
        return turns

    async def control(self, make: Callable[[int], Message]) -> ControlReply:
        """Send the scheduler what ``make`` makes of a call_id, and wait for its answer."""
        self._check_alive()
        return await self._calls.call(make)

    def set_weight_version(self, version: str) -> None:
        """What replies tell from now on, until new processes begin with the first weights again."""
        first = self.config.first_weight_version or self.config.weight_version
        self.config = msgspec.structs.replace(self.config, weight_version=version, first_weight_version=first)

    async def radix_cache(self, k: int = 10) -> dict[str, Any]:
        """What the prefix cache holds: sizes in tokens, counters, and its k hottest prefixes with the text of their ends."""
        self._check_alive()
        reply = await self._calls.call(lambda call_id: CacheReportReq(call_id=call_id, k=k))
        return await self.in_pool(with_texts, reply.state, self.tokenizer)

    async def explain_cache(self, request: GenerateInput) -> dict[str, Any]:
        """How much of one prompt would hit the prefix cache, and where it departs from the nearest cached prefix.

        Of the request only prompt, extra_key and cache_salt count. Raises RequestError as ``start`` does.
        """
        self._check_alive()
        message = await self.in_pool(self._validator.prompt, request)
        reply = await self._calls.call(
            lambda call_id: ExplainCacheReq(
                call_id=call_id, input_ids=message.input_ids, extra_key=message.extra_key, cache_salt=message.cache_salt
            )
        )
        return await self.in_pool(explanation_of, reply.state, self.tokenizer)

    def in_pool(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run what may take long (tokenising, templating) on a worker thread, so that the loop goes on."""
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def health(self) -> Health:
        """From heartbeats; costs no request."""
        return self._monitor.health(dead=str(self._life.error or ""), draining=self.draining, restarting=self._life.restarting)

    def hangs(self, limit: float) -> str:
        """Why the scheduler counts as hung after ``limit`` seconds; "" if it does not. From any thread."""
        return self._monitor.hangs(limit)

    @property
    def is_restarting(self) -> bool:
        """The engine's processes died and are being started again."""
        return self._life.restarting

    @property
    def num_live(self) -> int:
        """Choices that have not finished."""
        return len(self._table)

    @property
    def num_routing_keys(self) -> int:
        return self._table.num_routing_keys()

    @property
    def num_waiting_for_grammars(self) -> int:
        return self._grammars.num_waiting

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is live; False when ``timeout`` seconds passed first."""
        deadline = time.monotonic() + timeout
        while self._table and time.monotonic() < deadline:
            await asyncio.sleep(IDLE_POLL)
        return not self._table

    # --- a death that is not the end ----------------------------------------------------------------------------------------------

    async def suspend(self) -> None:
        """The processes died and will be started again: what has begun to answer fails, the rest, and what comes now, waits."""
        link, self._link = self._link, None
        self._life.suspend()
        if link is not None:
            await link.close(linger=False)
        self._calls.fail(self._life.new_error)
        self._grammars.forget()
        self.set_weight_version(self.config.first_weight_version or self.config.weight_version)
        self.stats.restarted()
        self._recovery().give_up_begun(self._life.new_error)

    async def resume(self) -> None:
        """New processes are ready: send them what waits."""
        if self._life.error is None:
            self.start_loop()
            self._life.resume()
            await self._recovery().go_on(self._grammars.reload)

    def _recovery(self) -> Recovery:
        return Recovery(self._table, self.watch, self._forget, self._send_request)

    def _forget(self, rid: str, reason: FinishReason) -> None:
        self._sessions.take(rid, [], reason)
        self._table.remove(rid)

    # --- the end ------------------------------------------------------------------------------------------------------------------

    def fail(self, error: EngineDeadError) -> None:
        """Give every waiter, and every later call, this error. From any thread; the first error stays."""
        self._life.end(error)
        loop = self._link.loop if self._link is not None else None
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed meanwhile: nobody waits
                loop.call_soon_threadsafe(self._fail_waiters)

    def _fail_waiters(self) -> None:
        self._life.resume()  # who waits for that must know
        for generation in self._table.generations():
            generation.fail(self._life.new_error())
        for choice in self._table.choices():
            self.watch.failed(choice.track, DIED)
        self._table.clear()
        self._calls.fail(self._life.new_error)

    def begin_shutdown(self) -> None:
        """Tell the other processes to exit; waiters get EngineDeadError. Messages are still taken in until ``close``."""
        self.draining = True
        self._life.end(EngineDeadError("the engine was shut down"))
        self._fail_waiters()
        if self._link is not None:
            self._link.send_shutdown()

    async def close(self) -> None:
        """Close sockets and thread pool. Idempotent."""
        self.draining = True
        self._life.end(EngineDeadError("the engine was shut down"))
        self._fail_waiters()
        self._sessions.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    def _check_alive(self) -> None:
        self._life.check()

    def _check_open(self) -> None:
        if self._life.error is not None:
            raise self._life.new_error()
        if self.draining:
            raise RequestError("The server is shutting down.", status_code=503, err_type="ServiceUnavailable")

    @property
    def is_full(self) -> bool:
        """As many requests are alive as may run and wait."""
        limit = max_live_requests(self.info.max_running_requests, self.info.max_queued_requests)
        return limit is not None and len(self._table) >= limit

    def _check_room(self, plan: RequestPlan) -> None:
        """Refuse at once what the scheduler would refuse; not what may displace another by its priority."""
        info = self.info
        has_rank = info.priority_scheduling and (plan.service.priority is not None or info.default_priority_value is not None)
        if self.is_full and not has_rank:
            self.stats.counters["admission_rejections"].add(1)
            raise RequestError(QUEUE_FULL_MESSAGE, status_code=503, err_type="ServiceUnavailableError")

    # --- messages -----------------------------------------------------------------------------------------------------------------

    def _ask(self, message: msgspec.Struct) -> None:
        """Send what needs an answer. Raises EngineDeadError when none would come."""
        self._life.check()
        self._send(message)

    def _send(self, message: msgspec.Struct) -> None:
        if self._link is not None:
            self._link.send(message)

    def _take(self, message: ToTokenizer) -> None:
        if isinstance(message, TextOutput):
            self._take_rows(message)
        elif isinstance(message, ControlReply):
            self._calls.take(message)
        elif isinstance(message, Heartbeat):
            self._monitor.take(message)
        else:
            self.stats.take(message)

    def _receive_ended(self, error: BaseException | None) -> None:
        detail = "".join(traceback.format_exception(error)) if error is not None else ""
        self.fail(EngineDeadError(f"the tokenizer manager cannot receive: {error}", detail))

    def _take_rows(self, rows: TextOutput) -> None:
        ids = unpack_ids(rows.token_ids).tolist()
        logprobs, hidden, timings = dict(rows.logprobs), dict(rows.hidden), dict(rows.timings)
        end = 0
        for row, rid in enumerate(rows.rids):
            start, end = end, end + rows.num_ids[row]
            choice = self._table.get(rid)
            if choice is None:
                if self._life.error is None:
                    self.watch.stray(rid)
                continue
            output = output_of_row(rows, row, index=choice.index, token_ids=ids[start:end])
            output.logprobs, output.hidden = logprobs.get(row), hidden.get(row)
            self._deliver(rid, choice, output, timings.get(row))

    def _deliver(self, rid: str, choice: Choice, output: Output, timings: Timings | None = None) -> None:
        if output.finish_reason is not None and self._recovery().sends_again(choice, output):
            return
        self._sessions.take(rid, output.token_ids, output.finish_reason)
        if output.finish_reason is not None:
            self._table.remove(rid)
        self.watch.row(choice.track, output, timings)
        choice.generation.push(output)


def _make_watch(config: TokenizerManagerConfig, stats: RequestStats) -> RequestWatch:
    watchers: list[Watcher] = [stats]
    if config.log_requests:
        watchers.append(RequestLog(config.log_requests_level, config.log_requests_format))
    return RequestWatch(watchers, keep_texts=config.log_requests and config.log_requests_level >= TEXTS)
