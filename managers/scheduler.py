"""Scheduler: which requests run in the next step. One per rank; it owns the waiting queue, the live table and the prefix cache.

Three verbs: ``next_batch`` decides, ``launch`` starts the forward step, ``absorb`` takes its results in. A decision depends on
messages and on what follows from them, never on a clock or on chance.
"""

from __future__ import annotations

import logging

import numpy as np

from ..model_executor.step import FatalStepError, Runner, StepHandle
from .constrained.step_masks import StepMasks
from .faults import Faults
from .io_struct import FinishReason
from .output_stream import OutputStream
from .prefill_planner import Memory, PrefillLimits, PrefillPlan, PrefillPlanner
from .req import Req
from .request_gate import DISPLACED, QUEUE_FULL, RequestGate
from .result_processor import ResultProcessor
from .retraction import NewTokenRatio, retraction_order
from .schedule_batch import ScheduleBatch, build_extend, build_next, mix
from .schedule_policy import SchedulePolicy, plan_preemption
from .stats import SchedulerStats
from .step_log import Loads
from .waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

NO_ROWS = np.empty(0, np.int32)


class Scheduler:
    """Built from parts; has no base class. Torch-free: the runner is whatever implements the Runner protocol."""

    def __init__(
        self,
        *,
        memory: Memory,
        runner: Runner,
        policy: SchedulePolicy,
        limits: PrefillLimits,
        ratio: NewTokenRatio,
        outputs: OutputStream,
        stats: SchedulerStats,
        faults: Faults,
        gate: RequestGate | None = None,
    ) -> None:
        self.memory = memory
        self.runner = runner
        self.ratio = ratio
        self.outputs = outputs
        self.stats = stats
        self.stats.log.loads = self.loads
        self.faults = faults
        self.gate = gate or RequestGate()
        self.waiting = WaitingQueue(policy, memory.cache)
        self.planner = PrefillPlanner(memory, self.waiting, limits, ratio)
        self.running: np.ndarray = NO_ROWS  # rows that decode, in the order of admission
        self.chunked: Req | None = None  # the one request whose prompt is computed in part
        self.live: dict[str, Req] = {}
        self.decode_debt = 0  # decode steps that are due before the next prefill step
        self.masks = StepMasks(memory.table, self.abort, late=runner.info.device == "cpu")
        self.results = ResultProcessor(memory.table, outputs, self.finish, self._keep, self._pin)

    # --- the three verbs

    def next_batch(self, *, in_flight: bool) -> ScheduleBatch | None:
        """The next step, or None. in_flight: a launched step is not absorbed yet, so short memory may be about to ease."""
        if self.faults.at("scheduler_die"):
            raise RuntimeError("BANYAN_FAULTS: scheduler_die")
        if self.gate.paused or (in_flight and self.masks.must_wait(self.running)):
            return None
        if self.decode_debt and len(self.running):
            self.decode_debt -= 1
            return self._next_decode(in_flight=in_flight)
        plan = self._plan_prefill()
        if plan and not plan.admissions and self._preempts(plan):
            if in_flight:
                return None
            plan = self._preempt(plan)
        if plan and not in_flight:
            plan = self._without_holds(plan)
        batch = self._carry_out(plan) if plan and plan.admissions else None
        return batch or self._next_decode(in_flight=in_flight)

    def launch(self, batch: ScheduleBatch) -> StepHandle:
        """Start the step on the device."""
        if self.faults.at("step_fail"):
            batch.step.input_ids[:] = np.iinfo(np.int64).max
        self.masks.launching(batch)
        batch.step.rewrites = self.memory.table.pool.rewrites
        return self.runner.launch(batch.step)

    def absorb(self, batch: ScheduleBatch, handle: StepHandle) -> None:
        """Wait for the step and take its results in. A step that raised fails the requests that were in it, and only those.

        Raises FatalStepError.
        """
        try:
            with self.stats.waiting():
                output = handle.wait()
        except FatalStepError:
            raise
        except Exception as error:
            logger.exception("a forward step failed; its %d requests are aborted", len(batch.rows))
            reason = FinishReason(
                kind="abort",
                message=f"The forward pass failed: {type(error).__name__}.",
                status_code=500,
                err_type="InternalServerError",
            )
            self.results.fail(batch, reason)
        else:
            num_decode = len(batch.rows) - batch.num_prefill
            num_prefill = len(batch.step.input_ids) - num_decode
            if not output.given_up:
                self.stats.step(output.elapsed, num_prefill_tokens=num_prefill, num_decode_rows=num_decode, graph=output.graph)
            self.results.absorb(batch, output)
        finally:
            self.masks.absorbed()

    def give_up(self, batch: ScheduleBatch) -> None:
        """Tell a step under way if all its rows have changed hands since: its results would be skipped, and its KV is nobody's."""
        if (self.memory.table.epochs[batch.rows] != batch.epochs).all():
            batch.step.stop[0] = 1

    # --- requests come and go

    def add(self, req: Req) -> None:
        """Queue a request. If too many are alive, it is refused, or one that waits with a lower priority gives way to it."""
        if self.gate.is_full(len(self.live)) and not self._displace(req):
            self.outputs.emit_waiting(req, QUEUE_FULL)
            self.stats.num_refused += 1
            return
        self.live[req.rid] = req
        self.gate.timers.arrived(req)
        self.waiting.add(req)

    def _displace(self, req: Req) -> bool:
        policy = self.waiting.policy
        if not policy.by_priority or not len(self.waiting):
            return False
        worst = self.waiting.worst()
        return policy.rank_of(worst.priority) < policy.rank_of(req.priority) and self.abort(worst.rid, DISPLACED)

    def drop(self, req: Req, reason: FinishReason) -> None:
        """End a request that neither waits nor has a row."""
        self.outputs.emit_waiting(req, reason)
        self._forget(req)

    def _forget(self, req: Req) -> None:
        del self.live[req.rid]
        self.gate.timers.ended(req)

    def abort(self, rid: str, reason: FinishReason) -> bool:
        """End a request now, in whatever phase it is; says whether it was alive."""
        req = self.live.get(rid)
        if req is None:
            return False
        req.session_hold = ""
        if req.row:
            self.outputs.emit(np.array([req.row], np.int32), {req.row: reason})
            self.finish(req)
        else:
            self.waiting.remove(req)
            self.drop(req, reason)
        self.stats.num_aborted += 1
        return True

    def finish(self, req: Req, *, share: bool = True) -> None:
        """Give a seated request's confirmed KV to the cache (unless it may be broken) and its row back; its session may keep it."""
        self._forget(req)
        self._vacate(req, share=share and not req.probe, session=req.session_hold)

    def tick(self, now: float) -> None:
        """It is ``now``: end the requests whose time is over."""
        self.gate.timers.now = now
        self.memory.pins.expire(now)
        while (due := self.gate.timers.pop_due()) is not None:
            self.abort(*due)

    def retract_all(self) -> None:
        """Send every request that has a row back to the queue. Only when every launched step is absorbed."""
        for req in self.memory.table.seated():
            self._retract(req)

    def loads(self) -> Loads:
        """What runs, waits and is held now."""
        total = self.memory.allocator.num_slots
        return Loads(
            num_running=len(self.live) - len(self.waiting),
            num_waiting=len(self.waiting),
            num_used_tokens=total - self.memory.allocator.available - self.memory.cache.evictable_size,
            num_tokens=total,
            num_pending_tokens=self.waiting.num_tokens + self._unfinished_prompt(),
        )

    def _unfinished_prompt(self) -> int:
        table, req = self.memory.table, self.chunked
        return int(table.known_lens[req.row] - table.launched_lens[req.row]) if req else 0

    def is_idle(self) -> bool:
        """Nothing runs or waits. A launched step may still be under way."""
        return not self.live

    def is_resting(self) -> bool:
        """No step will be launched before another message comes."""
        return not self.live or self.gate.paused

    def is_drained(self) -> bool:
        """Nothing holds KV, and nothing will before another message comes: idle, or paused with all requests in the queue."""
        return not self.live or (self.gate.paused and len(self.live) == len(self.waiting))

    # --- prefill

    def _plan_prefill(self) -> PrefillPlan | None:
        if self.chunked is None and (self.gate.closed or not len(self.waiting)):
            return None
        return self.planner.plan(self.chunked, self.running)

    def _without_holds(self, plan: PrefillPlan) -> PrefillPlan | None:
        """A plan that does not fail for what sessions and pins hold, if nothing runs that could make room instead."""
        replanned: PrefillPlan | None = plan
        while replanned and replanned.head and not replanned.admissions and not len(self.running):
            if not self.memory.drop_hold():
                break
            replanned = self._plan_prefill()
        return replanned

    def _carry_out(self, plan: PrefillPlan) -> ScheduleBatch | None:
        """Lock, seat, allocate. Nothing is evicted before all planned prefixes are locked, so each match is as it was planned."""
        table, reqs = self.memory.table, plan.reqs
        new = [req for req in reqs if not req.row]
        for req in new:
            self._seat(req)
        rows = np.array([req.row for req in reqs], np.int32)
        ends = np.array([admission.prefix_len + admission.extend_len for admission in plan.admissions], np.int32)
        slots = self._alloc_extend(rows, ends)
        if slots is None:
            for req in reversed(new):
                self._send_back(req)
            return None
        num_cached = sum(int(table.kv_lens[req.row]) for req in new)
        batch = build_extend(table, rows, ends - table.kv_lens[rows], slots)
        self.chunked = None if plan.admissions[-1].final else reqs[-1]
        self.decode_debt = self.planner.limits.decode_interval
        if self.planner.limits.mixed:
            batch = self._mix(batch)
        joins = rows[(ends == table.known_lens[rows]) & (table.launched_lens[rows] < table.limits[rows])]
        self.running = np.concatenate([self.running, joins])
        for req in plan.deferred:
            req.num_waits += 1
        self.waiting.tick(len(batch.step.input_ids))
        self.stats.prefill(num_reqs=len(reqs), num_new=len(slots), num_cached=num_cached)
        return batch

    def _mix(self, batch: ScheduleBatch) -> ScheduleBatch:
        """Let the running rows decode in the same step, if there are slots for it without retracting anyone."""
        rows = self._decoding()
        slots = self._alloc_decode(rows) if len(rows) else None
        if slots is None:
            return batch
        batch = mix(self.memory.table, batch, build_next(self.memory.table, rows, slots))
        self._drop_complete()
        self.stats.decode(num_reqs=len(slots))
        return batch

    def _alloc_extend(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray | None:
        table, allocator = self.memory.table, self.memory.allocator
        prefix_lens = table.kv_lens[rows]
        last_slots = table.pool.table[rows, prefix_lens - 1]
        self._make_room(allocator.extend_cost(prefix_lens, ends))
        return allocator.alloc_extend(prefix_lens, ends, last_slots)

    def _make_room(self, num_tokens: int) -> None:
        short = num_tokens - self.memory.allocator.available
        if short > 0:
            self.stats.evict(self.memory.cache.evict, short)

    def _seat(self, req: Req) -> None:
        self.waiting.remove(req)
        hold, prefix_slots = self.memory.cache.lock_prefix(req.key, req.matchable)
        row = self.memory.table.seat(req, prefix_slots)
        req.hold = hold
        req.note_seated()
        hold.priority = req.cache_hint.priority if req.cache_hint else 0
        if req.cached_tokens is None:
            req.cached_tokens = min(len(prefix_slots), req.num_prompt)
        self.gate.timers.seated(req)
        self.planner.prefilling[row] = (req.key, req.token_ids)
        self.outputs.seat(req)

    # --- preemption

    def _preempts(self, plan: PrefillPlan) -> bool:
        return plan.head is not None and self.chunked is None and bool(self._victims(plan.head))

    def _victims(self, head: Req) -> list[Req]:
        """Running requests that may give way to one that waits, enough of them, or none."""
        policy, table = self.waiting.policy, self.memory.table
        if policy.preemption_threshold is None:
            return []
        reqs = [table.req(row) for row in self.running.tolist()]
        ranks = np.array([policy.rank_of(req.priority) for req in reqs], np.int64)
        freed = [
            int(table.kv_lens[req.row]) - req.held().length + table.limits[req.row] - table.launched_lens[req.row] for req in reqs
        ]
        need = self.planner.shortfall(head, self.running)
        indices = plan_preemption(need, policy.rank_of(head.priority), policy.preemption_threshold, ranks, np.array(freed))
        return [reqs[index] for index in indices]

    def _preempt(self, plan: PrefillPlan) -> PrefillPlan | None:
        """Send the victims back and plan again. Only called when every launched step is absorbed."""
        for req in self._victims(plan.head) if plan.head else []:
            self._retract(req)
        return self._plan_prefill()

    # --- decode

    def _next_decode(self, *, in_flight: bool) -> ScheduleBatch | None:
        rows = self._decoding()
        if not len(rows):
            return None
        forced = self.faults.every("retract_every") and len(self.running) > 1
        slots = None if forced else self._alloc_decode(rows)
        if slots is not None:
            self.ratio.decay()
        elif in_flight:
            return None
        else:
            slots = self._retract_until_it_fits()
            if slots is None:
                return None
            rows = self._decoding()
        batch = build_next(self.memory.table, rows, slots)
        self._drop_complete()
        self.waiting.tick(len(slots))
        self.stats.decode(num_reqs=len(slots))
        return batch

    def _decoding(self) -> np.ndarray:
        """Rows of the next decode step: all, or with several stages one micro-batch of those whose newest token is known."""
        stages = self.runner.info.stages
        if stages == 1:
            return self.running
        table = self.memory.table
        known = table.known_lens[self.running] >= table.launched_lens[self.running]
        share: np.ndarray = self.running[known][: -(-len(self.running) // stages)]
        return share

    def _drop_complete(self) -> None:
        """Rows whose last token is launched decode no more."""
        table = self.memory.table
        self.running = self.running[table.launched_lens[self.running] < table.limits[self.running]]

    def _alloc_decode(self, rows: np.ndarray) -> np.ndarray | None:
        """Slots for the newest token of each row, or its jump, or None if they are not to be had."""
        if self.faults.draw("alloc_fail"):
            return None
        table, allocator = self.memory.table, self.memory.allocator
        if table.jump_ends[rows].any():
            return self._alloc_extend(rows, table.next_ends(rows))
        seq_lens = table.launched_lens[rows]
        self._make_room(allocator.decode_cost(seq_lens))
        return allocator.alloc_decode(seq_lens, table.pool.table[rows, seq_lens - 2])

    def _retract_until_it_fits(self) -> np.ndarray | None:
        """Send requests back to the queue, at least one, until the rest can decode. The last one stays: alone it always fits.

        Only called when every launched step is absorbed.
        """
        table, slots = self.memory.table, None
        outputs = table.known_lens[self.running] - table.prompt_lens[self.running]
        order = retraction_order(outputs, table.prompt_lens[self.running])
        victims = [self.chunked] if self.chunked else []
        victims += [table.req(int(row)) for row in self.running[order[:-1]]]
        for req in victims:
            self._retract(req)
            self.faults.served("retract_every")
            slots = self._alloc_decode(self._decoding())
            if slots is not None:
                break
        while slots is None and self.memory.drop_hold():
            slots = self._alloc_decode(self._decoding())
        outputs = table.known_lens[self.running] - table.prompt_lens[self.running]
        self.ratio.retracted(outputs, table.limits[self.running] - table.prompt_lens[self.running])
        return slots

    def _retract(self, req: Req) -> None:
        req.num_retractions += 1
        self.stats.retracted(req.num_prompt, int(self.memory.table.known_lens[req.row]) - req.num_prompt)
        self._send_back(req)

    def _send_back(self, req: Req) -> None:
        """From its row to its place in the queue."""
        self.outputs.unseat(req)
        self._vacate(req)
        self.waiting.add(req)

    def _vacate(self, req: Req, *, share: bool = True, session: str = "") -> None:
        table, row = self.memory.table, req.row
        if req is self.chunked:
            self.chunked = None
        self.running = self.running[self.running != row]
        if share and session:
            self.memory.holds.keep(session, req.held(), table.confirmed_tokens(row), table.slots(row))
        elif share:
            self.memory.cache.cache_finished_req(req.held(), table.confirmed_tokens(row), table.slots(row))
        else:
            self.memory.cache.release(req.held(), table.slots(row))
        table.unseat(req)
        self.planner.prefilling.pop(row, None)

    def _keep(self, req: Req) -> None:
        """Share what a request that goes on has computed so far."""
        table, row = self.memory.table, req.row
        tokens = table.confirmed_tokens(row)
        if not req.probe:
            self.memory.cache.cache_unfinished_req(req.held(), tokens, table.slots(row)[: len(tokens)])
        if row in self.planner.prefilling and len(tokens) >= len(self.planner.prefilling[row][1]):
            del self.planner.prefilling[row]

    def _pin(self, req: Req) -> int | None:
        """Keep the prompt of a request that is about to finish for as long as it asked; how many tokens that are, None if none were
        asked for."""
        hint = req.cache_hint
        if hint is None or not hint.pin_seconds:
            return None
        self._keep(req)
        prompt = self.memory.table.tokens[req.row, : req.num_prompt]
        return self.memory.pins.pin(req.key, prompt, self.gate.timers.now + hint.pin_seconds)
