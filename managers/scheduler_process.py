"""Body of a scheduler process: build the parts, report ready, turn the loop until told to stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from ..mem_cache.allocator import SlotAllocator
from ..mem_cache.prefix_cache import NoPrefixCache, PrefixCache
from ..mem_cache.radix_cache import RadixCache
from ..mem_cache.req_to_token import ReqToTokenPool
from ..mem_cache.sizing import max_prompt_len, max_req_len, max_running_requests
from ..model_executor.factory import create_runner
from ..model_executor.step import Runner
from .config import SchedulerConfig, SchedulerInfo
from .constrained.constraint import GrammarStore
from .constrained.grammar import Vocabulary, stop_ids_of
from .constrained.jump_forward import JumpForward
from .constrained.mask_filler import NO_LIMIT, MaskFiller
from .control import Control
from .deadlines import Timers
from .decisions.file import DecisionFile, NoFile, Subject, last_turns, write_crash
from .decisions.log import Recorder
from .event_loop import EventLoop, make_loop
from .faults import Faults
from .io_struct import Ended, Heartbeat, TokenOutput
from .ipc import IpcNames, Sender
from .live_table import LiveTable
from .output_stream import OutputStream
from .pace import explain_pace, with_pace
from .pins import Pins
from .prefill_planner import SHARED_MIN, Memory, PrefillLimits
from .processes.reports import Reports
from .processes.start_clock import StartClock
from .ranks.group import RankGroup
from .reporter import Reporter
from .request_gate import RequestGate, max_live_requests
from .retraction import NewTokenRatio
from .schedule_policy import CACHE_AWARE, SchedulePolicy
from .scheduler import Scheduler
from .sessions.holds import SessionHolds
from .stats import SchedulerStats
from .step_log import StepLog
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL = 1.0
DEFAULT_CHUNK = {"cpu": 512, "cuda": 4096}


def run_scheduler(config: SchedulerConfig, reports: Reports) -> None:
    """Serve until ShutdownReq. reports(info) is called once requests could be served; what raises ends the process."""
    clock = StartClock()
    faults = Faults.from_env()
    if faults.value("load_fail"):
        raise RuntimeError("BANYAN_FAULTS: load_fail")
    runner = create_runner(config.runner)
    clock.lap("model")
    config = with_pace(config, runner.info)
    context = zmq.Context()
    failed = True
    try:
        _serve(config, reports, runner, context, clock)
        failed = False
    finally:
        if not failed or config.runner.ranks.world_size == 1:  # else a step may wait for a rank that is no more
            runner.close()
        context.destroy(linger=1000)


def _serve(config: SchedulerConfig, reports: Reports, runner: Runner, context: zmq.Context[Any], clock: StartClock) -> None:
    tokenizer = Tokenizer.load(config.tokenizer_path, encoder=False)
    info, memory = build_memory(config, runner, tokenizer)
    group = RankGroup(config, context)
    to_detokenizer, tell = group.sender(config.ipc.detokenizer), group.sender(config.ipc.tokenizer)
    recorder: Recorder | None = None

    def send(output: TokenOutput) -> None:
        if recorder is not None:
            recorder.sent(output)
        to_detokenizer(output)
        if config.tells_ended and any(output.finish_reasons):
            tell(Ended(rids=[rid for rid, reason in zip(output.rids, output.finish_reasons, strict=True) if reason]))

    scheduler = build_scheduler(config, info, memory, runner, send)
    subject = Subject(config, info, memory.table.eos_mask, scheduler.faults)
    sink = DecisionFile(config.record_decisions, subject) if config.record_decisions else NoFile()
    recorder = Recorder(scheduler, group.checked(sink), compares=config.links.check)
    scheduler.masks.grammars = GrammarStore(
        lambda: Vocabulary.of(
            tokenizer, vocab_size=info.model.vocab_size, stop_ids=stop_ids_of(info.model, tokenizer.eos_token_ids)
        ),
        group.sender_of_any_thread(config.ipc.tokenizer),
        None if config.disable_jump_forward else lambda: _jumper(tokenizer),
    )
    control = Control(
        *(scheduler, group.inbox, tell, tokenizer, config),
        tap=recorder.take,
        last_turns=lambda: last_turns(subject, recorder.ring),
    )
    loop: EventLoop = make_loop(recorder, control.receive, overlap=info.overlap, model=info.model)
    pulse = Pulse(scheduler)
    reporter = Reporter(scheduler, tell)
    group.start(reports.fatal)
    if group.leads:
        threading.Thread(target=pulse.beat, args=(context, config.ipc), daemon=True, name="heartbeat").start()
    logger.info("The scheduler is ready after %s", clock.lap("caches"))
    reports(msgspec.to_builtins(info))
    try:
        while not control.shutdown:
            pulse.turned()
            reporter.turn()
            loop.turn()
    except Exception as error:
        if config.crash_dump_folder:
            recorder.end_turn()
            write_crash(config.crash_dump_folder, subject, recorder.ring, error)
        group.failed(error)
        raise
    finally:
        group.stop()
        recorder.close()


def _jumper(tokenizer: Tokenizer) -> JumpForward:
    """Builds the encoder. A tokenizer without a byte table has no grammars, so is never asked for."""
    table = tokenizer.byte_table
    return JumpForward(lambda text: tokenizer.encode(text, add_special_tokens=False), table.tokens if table else [])


def build_memory(config: SchedulerConfig, runner: Runner, tokenizer: Tokenizer) -> tuple[SchedulerInfo, Memory]:
    """Size the pools, give the runner its KV, and say what was derived and why."""
    model, page_size = runner.info, config.runner.page_size
    explain = dict(model.explain)
    total = runner.max_cache_tokens()
    max_len = max_req_len(model.context_len, total, page_size)
    max_running = max_running_requests(total, model.context_len, user_limit=config.max_running_requests, cpu=model.device == "cpu")
    why = "derived" if config.max_running_requests is None else "as given"
    explain["max_running_requests"] = f"{max_running}, {why}, for {total} slots and a context of {model.context_len}"
    chunk = _chunk_size(config, model.device, explain)
    shared_min = config.shared_prefix_min
    explain["shared_prefix_min"] = f"{shared_min or SHARED_MIN[model.device]}, {'as given' if shared_min else 'by device'}"
    explain["target_itl_ms"] = explain_pace(config)
    overlap = config.runner.overlap
    explain["overlap"] = "on" if overlap else "off, as given"
    _explain_service(config, explain, max_running)
    pool = ReqToTokenPool(max_running, max_len + page_size)
    runner.init_cache(total, pool.table)
    allocator = SlotAllocator(total, page_size)
    cache: PrefixCache = (
        NoPrefixCache(allocator)
        if config.disable_radix_cache
        else RadixCache(allocator, eviction_policy=config.radix_eviction_policy)
    )
    eos_mask = np.zeros(model.vocab_size, np.bool_)
    eos_mask[[i for i in {*model.eos_token_ids, *tokenizer.eos_token_ids} if i < model.vocab_size]] = True
    info = SchedulerInfo(
        model=model,
        max_total_num_tokens=total,
        max_req_input_len=max_prompt_len(model.context_len, total, page_size),
        max_req_len=max_len,
        max_running_requests=max_running,
        max_queued_requests=config.max_queued_requests,
        priority_scheduling=_by_priority(config),
        default_priority_value=config.default_priority_value,
        page_size=page_size,
        chunked_prefill_size=chunk,
        overlap=overlap,
        explain=explain,
    )
    holds = SessionHolds(cache, allocator, int(total * config.session_hold_fraction))
    pins = Pins(cache, int(total * config.pin_budget_fraction))
    return info, Memory(allocator=allocator, cache=cache, table=LiveTable(pool, eos_mask), holds=holds, pins=pins)


def build_scheduler(
    config: SchedulerConfig, info: SchedulerInfo, memory: Memory, runner: Runner, send: Callable[[Any], None]
) -> Scheduler:
    """The scheduler over parts that exist."""
    stats = SchedulerStats(log=StepLog(decode_log_interval=config.decode_log_interval))
    scheduler = Scheduler(
        memory=memory,
        runner=runner,
        policy=_policy(config),
        limits=PrefillLimits(
            max_prefill_tokens=config.max_prefill_tokens,
            chunked_prefill_size=info.chunked_prefill_size,
            max_requests=config.prefill_max_requests,
            mixed=config.enable_mixed_chunk or bool(config.target_itl_ms),
            decode_interval=config.prefill_decode_interval,
            shared_min=config.shared_prefix_min or SHARED_MIN[info.model.device],
        ),
        ratio=NewTokenRatio.create(config.schedule_conservativeness),
        outputs=OutputStream(memory.table, send),
        stats=stats,
        faults=Faults.from_env(),
        gate=RequestGate(
            max_live=max_live_requests(info.max_running_requests, config.max_queued_requests),
            timers=Timers(queue_timeout=config.request_queue_timeout, running_timeout=config.request_running_timeout),
        ),
    )
    # Ranks must decide alike, so none of several goes by its own clock.
    scheduler.masks.filler = MaskFiller(config.grammar_mask_timeout if config.runner.ranks.world_size == 1 else NO_LIMIT)
    return scheduler


def _by_priority(config: SchedulerConfig) -> bool:
    return config.enable_priority_scheduling or config.schedule_policy == "priority"


def _policy_name(config: SchedulerConfig) -> str:
    return "fcfs" if config.disable_radix_cache and config.schedule_policy in CACHE_AWARE else config.schedule_policy


def _explain_service(config: SchedulerConfig, explain: dict[str, str], max_running: int) -> None:
    """Say who is served when, and for how long."""
    name, queued = _policy_name(config), config.max_queued_requests
    why = "as given" if name == config.schedule_policy else f"{config.schedule_policy} needs the prefix cache, which is off"
    explain["schedule_policy"] = f"{name}, {why}"
    if not _by_priority(config):
        explain["priority_scheduling"] = "off: priorities of requests are ignored"
    elif config.disable_priority_preemption:
        explain["priority_scheduling"] = "on, for the queue only"
    else:
        explain["priority_scheduling"] = (
            f"on; displaces what is lower by more than {config.priority_scheduling_preemption_threshold}"
        )
    explain["max_queued_requests"] = (
        "no limit" if queued is None else f"as given; a request is refused when {max_running + queued} are alive"
    )
    limits = {"in the queue": config.request_queue_timeout, "from the first start": config.request_running_timeout}
    given = [f"{seconds:g} s {where}" for where, seconds in limits.items() if seconds is not None]
    explain["request_timeouts"] = ", ".join(given) or "none"


def _policy(config: SchedulerConfig) -> SchedulePolicy:
    by_priority = _by_priority(config)
    preempts = by_priority and not config.disable_priority_preemption
    return SchedulePolicy(
        name=_policy_name(config),
        seed=config.runner.random_seed,
        by_priority=by_priority,
        low_values_first=config.schedule_low_priority_values_first,
        default_priority=config.default_priority_value,
        preemption_threshold=config.priority_scheduling_preemption_threshold if preempts else None,
        max_wait_steps=config.max_wait_steps,
    )


def _chunk_size(config: SchedulerConfig, device: str, explain: dict[str, str]) -> int | None:
    size, page_size = config.chunked_prefill_size, config.runner.page_size
    if size is not None and size <= 0:
        explain["chunked_prefill_size"] = "off, as given"
        return None
    why = "as given" if size is not None else f"the default on {device}"
    pages = max((size or DEFAULT_CHUNK[device]) // page_size, 1)
    explain["chunked_prefill_size"] = f"{pages * page_size}, {why}, in whole pages"
    return pages * page_size


@dataclass
class Pulse:
    """Tells the tokenizer manager once a second how the loop does, from a thread of its own: a long forward pass is no death."""

    scheduler: Scheduler
    last_turn: float = field(default_factory=time.monotonic)

    def turned(self) -> None:
        self.last_turn = time.monotonic()

    def beat(self, context: zmq.Context[Any], ipc: IpcNames) -> None:
        """Send until the context is destroyed."""
        sender = Sender(context, ipc.tokenizer, ipc.token)
        try:
            while True:
                sender.send(self._heartbeat(time.monotonic()))
                time.sleep(HEARTBEAT_INTERVAL)
        except zmq.ZMQError:
            return

    def _heartbeat(self, now: float) -> Heartbeat:
        stats, loads = self.scheduler.stats, self.scheduler.loads()
        since, num_prompt = stats.waiting_since, stats.num_prefill_tokens + stats.num_cached_tokens
        return Heartbeat(
            loop_age=max(now - self.last_turn, 0.0),
            forward_age=max(now - since, 0.0) if since else 0.0,
            num_running=loads.num_running,
            num_waiting=loads.num_waiting,
            num_used_tokens=loads.num_used_tokens,
            gen_throughput=stats.log.gen_throughput,
            cache_hit_rate=stats.num_cached_tokens / max(num_prompt, 1),
        )
