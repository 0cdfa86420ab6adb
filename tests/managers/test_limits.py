"""Time-outs, the bounded queue, pauses and flushes, turn by turn: a scheduler over the oracle and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import IPC, TOKENIZER, Harness, expected, prompt_of

from banyan.managers.config import RunnerConfig, SchedulerConfig
from banyan.managers.control import IDLE_WAIT, TICK_INTERVAL, Control
from banyan.managers.event_loop import OverlapLoop
from banyan.managers.io_struct import (
    AbortReq,
    ContinueReq,
    ControlReply,
    FlushCacheReq,
    GenerateReq,
    InternalStateReq,
    PauseReq,
    Tick,
    pack_ids,
)
from banyan.managers.sampling_params import SamplingParams

WAITING = "Request waiting timeout reached."
RUNNING = "Request running timeout reached."
DEADLINE = "Request deadline reached."
FULL = "The request queue is full."
DISPLACED = "The request is aborted by a higher priority request."


class Desk:
    """A scheduler with its Control; ``inbox`` is what arrives next, ``time`` what the clock says."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.scheduler = harness.scheduler
        self.time = 1000.0
        self.inbox: list[Any] = []
        self.replies: dict[int, ControlReply] = {}
        self.naps: list[float] = []
        self.ticks: list[float] = []
        config = SchedulerConfig(ipc=IPC, runner=RunnerConfig(model_path="", load_format="oracle"), tokenizer_path="", strict=True)
        self.control = Control(self.scheduler, self, self._reply, TOKENIZER, config, clock=lambda: self.time)  # type: ignore[arg-type]
        harness.loop = type(harness.loop)(self.scheduler, self.control.receive)
        launch, tick = harness.scheduler.launch, harness.scheduler.tick

        def counted(batch: Any) -> Any:
            assert not self.scheduler.gate.paused
            return launch(batch)

        def ticked(now: float) -> None:
            self.ticks.append(now)
            tick(now)

        harness.scheduler.launch = counted  # type: ignore[method-assign]
        harness.scheduler.tick = ticked  # type: ignore[method-assign]

    def _reply(self, reply: ControlReply) -> None:
        assert reply.call_id not in self.replies, "answered twice"
        self.replies[reply.call_id] = reply

    def wait(self, timeout: float) -> bool:
        self.naps.append(timeout)
        return bool(self.inbox)

    def take(self, own: Any) -> list[Any]:
        messages, self.inbox = self.inbox, []
        return [*own(), *messages]

    def ask(self, rid: str, length: int = 20, *, tokens: int = 200, **fields: Any) -> None:
        params = SamplingParams.parse({"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}, 512)
        ids = pack_ids(prompt_of(sum(rid.encode()), length))
        self.inbox.append(GenerateReq(rid=rid, input_ids=ids, sampling_params=params, **fields))

    def turn(self, times: int = 1) -> None:
        self.harness.turn(times)

    def after(self, seconds: float, turns: int = 1) -> None:
        self.time += seconds
        self.turn(turns)

    def message(self, rid: str) -> str | None:
        reason = self.harness.reasons.get(rid)
        return None if reason is None else reason.message or reason.kind

    def status(self, rid: str) -> int | None:
        return self.harness.reasons[rid].status_code

    def check(self, rid: str, length: int = 20, *, tokens: int = 200) -> None:
        """What was told of a request is what the oracle says."""
        ids = self.harness.ids[rid]
        prompt = prompt_of(sum(rid.encode()), length)
        stop = expected(prompt, tokens)
        assert ids[: len(stop)] == stop[: len(ids)]


@pytest.fixture
def desk(make: Any) -> Callable[..., Desk]:
    return lambda **options: Desk(make(**options))


# --- time -------------------------------------------------------------------------------------------------------------------------


def test_ticks_come_every_50_ms_in_front_of_the_messages(desk: Any) -> None:
    d = desk()
    d.ask("a")
    d.turn()
    assert d.ticks == [0.0]
    for _ in range(9):
        d.after(1 / 64)
    assert d.ticks == [0.0, 4 / 64, 8 / 64]
    order: list[str] = []
    d.control._handlers = {kind: lambda message: order.append(type(message).__name__) for kind in (Tick, AbortReq)}
    d.inbox.append(AbortReq(rid="a"))
    d.after(1.0)
    assert order == ["Tick", "AbortReq"]


def test_what_is_due_is_never_late(desk: Any) -> None:
    """A tick comes as soon as something is due, however short ago the last one was."""
    d = desk()
    d.ask("a", timeout=0.01)
    d.turn(2)
    d.after(0.009)
    assert d.message("a") is None
    d.after(0.002)
    assert d.message("a") == DEADLINE
    assert d.ticks[-1] < TICK_INTERVAL


def test_sleeps_until_something_is_due(desk: Any) -> None:
    d = desk()
    d.inbox.append(PauseReq(call_id=1, mode="in_place"))
    d.ask("a", timeout=0.3)
    d.turn(3)
    assert d.naps[0] == IDLE_WAIT
    assert 0.2 < d.naps[-1] <= 0.3


# --- time-outs in every phase -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2, 4, 6, 8])
def test_the_own_deadline_ends_a_request_in_every_phase(desk: Any, turns: int) -> None:
    """Queued, between two chunks, launched and not absorbed, decoding: and the others never notice."""
    d = desk(chunked_prefill_size=32, max_running_requests=2)
    for rid in ("a", "b", "c", "d"):
        d.ask(rid, 90, tokens=30, timeout=5.0 if rid in ("a", "d") else None)
    d.turn(turns)
    assert "a" not in d.harness.reasons
    d.after(5.1)
    for rid in ("a", "d"):
        assert (d.message(rid), d.status(rid)) == (DEADLINE, 504)
    d.harness.drain()
    for rid in "abcd":
        d.check(rid, 90, tokens=30)
    assert all(len(d.harness.ids[rid]) == 30 and d.harness.reasons[rid].kind == "length" for rid in "bc")


def test_the_queue_timeout_ends_only_who_never_ran(desk: Any) -> None:
    d = desk(max_running_requests=1, request_queue_timeout=2.0)
    for rid in "ab":
        d.ask(rid)
    d.turn(3)
    d.after(1.9)
    assert not d.harness.reasons
    d.after(0.2)
    assert (d.message("b"), d.status("b")) == (WAITING, 503)
    d.harness.drain()
    assert d.message("a") == "length"
    assert d.scheduler.gate.timers.next_due() == float("inf")


def test_a_chunked_prompt_has_left_the_queue(desk: Any) -> None:
    d = desk(chunked_prefill_size=32, request_queue_timeout=2.0)
    d.ask("a", 200, tokens=4)
    d.turn(2)
    d.after(3.0)
    assert not d.harness.reasons
    d.harness.drain()
    assert d.message("a") == "length"


@pytest.mark.parametrize("turns", [2, 3, 5, 9])
def test_the_running_timeout_counts_from_the_first_start(desk: Any, turns: int) -> None:
    d = desk(chunked_prefill_size=32, max_running_requests=2, request_running_timeout=2.0)
    for rid in "abc":
        d.ask(rid, 90)
    d.turn(turns)
    d.after(1.9)
    assert not d.harness.reasons
    d.after(0.2)
    assert (d.message("a"), d.status("a")) == (RUNNING, 503)
    assert d.message("c") is None, "the queue has no limit here"
    d.check("a", 90)
    d.after(1.5)
    assert d.message("c") is None
    for _ in range(3):
        d.after(2.1, turns=3)
    assert {d.message(rid) for rid in "abc"} == {RUNNING}
    d.harness.drain()


def test_a_retracted_request_is_still_running_and_not_queued(desk: Any) -> None:
    d = desk(request_queue_timeout=1.0, request_running_timeout=3.0)
    d.ask("a")
    d.turn(5)
    d.inbox.append(PauseReq(call_id=1, mode="retract"))
    d.turn(3)
    assert len(d.scheduler.waiting) == 1
    d.after(2.0)
    assert not d.harness.reasons
    d.after(1.1)
    assert d.message("a") == RUNNING
    d.check("a")
    assert d.scheduler.is_idle()


def test_timers_of_finished_requests_are_forgotten(desk: Any) -> None:
    d = desk(request_queue_timeout=5.0, request_running_timeout=5.0)
    for rid in "abc":
        d.ask(rid, tokens=3, timeout=9.0)
    d.turn()
    d.harness.drain()
    assert d.scheduler.gate.timers.next_due() == float("inf")
    del d.harness.reasons["a"], d.harness.ids["a"]
    d.inbox.append(AbortReq(rid="a"))
    d.ask("a", tokens=40)  # the same rid again, without a deadline
    d.after(8.0, turns=3)
    assert d.scheduler.gate.timers.next_due() == 13.0
    d.harness.drain()
    assert d.message("a") == "length"


# --- the bounded queue ------------------------------------------------------------------------------------------------------------


def test_a_burst_beyond_rows_and_queue_is_refused_and_no_more(desk: Any) -> None:
    d = desk(max_running_requests=3, max_queued_requests=2)
    rids = [f"r{index}" for index in range(9)]
    for rid in rids:
        d.ask(rid, tokens=10)
    d.turn()
    assert [rid for rid in rids if d.message(rid) == FULL] == rids[5:]
    assert all(d.status(rid) == 503 for rid in rids[5:])
    assert d.scheduler.stats.num_refused == 4
    d.harness.drain()
    for rid in rids[:5]:
        d.check(rid, tokens=10)
        assert len(d.harness.ids[rid]) == 10
    d.ask("again", tokens=2)
    d.turn()
    d.harness.drain()
    assert d.message("again") == "length"


def test_a_queue_of_none_serves_who_finds_a_row(desk: Any) -> None:
    d = desk(max_running_requests=2, max_queued_requests=0)
    for rid in "abc":
        d.ask(rid, tokens=5)
    d.turn()
    assert d.message("c") == FULL
    d.harness.drain()
    assert d.message("a") == d.message("b") == "length"


def test_a_better_request_displaces_the_worst_that_waits(desk: Any) -> None:
    d = desk(max_running_requests=1, max_queued_requests=2, enable_priority_scheduling=True, disable_priority_preemption=True)
    d.ask("runs", tokens=20, priority=0)
    d.turn(3)
    for rid, priority in (("old", 1), ("new", 1)):
        d.ask(rid, tokens=3, priority=priority)
    d.turn()
    d.ask("equal", tokens=3, priority=1)
    d.turn()
    assert (d.message("equal"), d.message("new")) == (FULL, None)
    d.ask("better", tokens=3, priority=2)
    d.turn()
    assert (d.message("new"), d.status("new")) == (DISPLACED, 503)
    d.ask("nothing", tokens=3)
    d.turn()
    assert d.message("nothing") == FULL
    d.harness.drain()
    assert [rid for rid, reason in d.harness.reasons.items() if reason.kind == "length"] == ["runs", "better", "old"]


def test_low_values_first_turns_it_around(desk: Any) -> None:
    d = desk(max_running_requests=1, max_queued_requests=1, schedule_policy="priority", schedule_low_priority_values_first=True)
    d.ask("runs", tokens=20, priority=0)
    d.turn(3)
    for rid, priority in (("five", 5), ("seven", 7), ("three", 3)):
        d.ask(rid, tokens=3, priority=priority)
        d.turn()
    assert (d.message("five"), d.message("seven"), d.message("three")) == (DISPLACED, FULL, None)
    d.harness.drain()


def test_without_priority_scheduling_priorities_change_nothing(desk: Any) -> None:
    d = desk(max_running_requests=1, max_queued_requests=1)
    for rid, priority in (("a", 0), ("b", 0), ("c", 99)):
        d.ask(rid, tokens=3, priority=priority)
    d.turn()
    assert (d.message("b"), d.message("c")) == (None, FULL)
    d.harness.drain()


# --- pauses -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("turns", [1, 2, 3, 5, 7])
def test_a_pause_in_every_phase(desk: Any, mode: str, turns: int) -> None:
    """Nothing is launched after it (the desk checks that), it is answered when no step is under way, and no token is lost."""
    d = desk(chunked_prefill_size=32, max_running_requests=2)
    for rid in "abc":
        d.ask(rid, 90, tokens=20)
    d.turn(turns)
    d.inbox.append(PauseReq(call_id=1, mode=mode))
    d.turn()
    d.ask("late", tokens=4)
    d.turn(3)
    assert d.replies[1].success
    steps = d.scheduler.stats.num_decode_steps, d.scheduler.stats.num_prefill_steps
    seated = len(d.harness.memory.table.seated())
    assert seated == 0 or mode == "in_place"
    assert "late" in d.scheduler.live
    d.inbox.append(FlushCacheReq(call_id=2))
    d.after(100.0, turns=3)
    assert d.replies[2].success == (seated == 0)
    assert (d.scheduler.stats.num_decode_steps, d.scheduler.stats.num_prefill_steps) == steps
    d.inbox.append(ContinueReq(call_id=3))
    d.turn()
    assert d.replies[3].success
    d.harness.drain()
    for rid in "abc":
        d.check(rid, 90, tokens=20)
        assert d.harness.reasons[rid].kind == ("abort" if mode == "abort" else "length")
    assert len(d.harness.ids["late"]) == 4


def test_aborts_and_time_outs_work_during_a_pause(desk: Any) -> None:
    d = desk(max_running_requests=2)
    for rid, timeout in (("a", None), ("b", 3.0), ("c", 3.0)):
        d.ask(rid, timeout=timeout)
    d.turn(4)
    d.inbox.append(PauseReq(call_id=1, mode="in_place"))
    d.turn(2)
    d.inbox.append(AbortReq(rid="a"))
    d.turn()
    assert d.message("a") == "Abort by client request."
    d.after(3.1)
    assert d.message("b") == d.message("c") == DEADLINE
    assert d.scheduler.is_idle()
    d.ask("d", tokens=2)
    d.turn(2)
    assert "d" in d.scheduler.live
    d.inbox.append(ContinueReq(call_id=2))
    d.turn()
    d.harness.drain()
    assert d.message("d") == "length"


def test_a_paused_queue_is_bounded_too(desk: Any) -> None:
    d = desk(max_running_requests=2, max_queued_requests=1)
    d.inbox.append(PauseReq(call_id=1, mode="retract"))
    for rid in "abcd":
        d.ask(rid, tokens=2)
    d.turn()
    assert d.message("d") == FULL
    d.inbox.append(ContinueReq(call_id=2))
    d.turn()
    d.harness.drain()


def test_modes_follow_each_other_and_a_wrong_one_changes_nothing(desk: Any) -> None:
    d = desk()
    d.ask("a", tokens=20)
    d.turn(3)
    d.inbox.append(PauseReq(call_id=1, mode="sleep"))
    d.turn(2)
    assert not d.replies[1].success
    assert not d.scheduler.gate.paused
    for call_id, mode in ((2, "in_place"), (3, "retract"), (4, "retract")):
        d.inbox.append(PauseReq(call_id=call_id, mode=mode))
        d.turn(2)
        assert d.replies[call_id].success
        assert len(d.harness.memory.table.seated()) == (mode == "in_place")
    d.inbox += [ContinueReq(call_id=5), ContinueReq(call_id=6)]
    d.turn()
    assert d.replies[5].success and d.replies[6].success
    d.harness.drain()
    d.check("a", tokens=20)


def test_a_pause_that_is_overtaken_says_so(desk: Any) -> None:
    d = desk()
    d.ask("a", tokens=20)
    d.turn(3)
    d.inbox += [PauseReq(call_id=1, mode="retract"), ContinueReq(call_id=2)]
    d.turn()
    assert not d.replies[1].success
    assert d.replies[2].success
    d.harness.drain()
    d.check("a", tokens=20)


# --- flush ------------------------------------------------------------------------------------------------------------------------


def test_flush_is_refused_at_once_or_waits_or_gives_up(desk: Any) -> None:
    d = desk()
    d.ask("a", tokens=30)
    d.turn(3)
    d.inbox += [FlushCacheReq(call_id=1), FlushCacheReq(call_id=2, timeout=1.0), FlushCacheReq(call_id=3, timeout=60.0)]
    d.turn()
    assert not d.replies[1].success
    assert "1 requests run" in d.replies[1].message
    assert 2 not in d.replies
    d.after(1.1)
    assert not d.replies[2].success
    assert 3 not in d.replies
    d.harness.drain()
    assert d.replies[3].success
    assert d.harness.memory.cache.evictable_size == 0
    assert d.harness.memory.allocator.available == d.harness.memory.allocator.num_slots


@pytest.mark.parametrize("turns", [1, 2, 4, 6])
def test_flush_never_comes_between_a_launch_and_its_results(desk: Any, turns: int) -> None:
    """All requests are aborted, so that nothing lives, but the step that was launched still writes: the flush waits for it."""
    d = desk(chunked_prefill_size=32)
    absorb, order = d.scheduler.absorb, []
    reset = d.harness.memory.cache.reset

    def absorbed(batch: Any, handle: Any) -> None:
        absorb(batch, handle)
        order.append("absorb")

    d.scheduler.absorb = absorbed
    d.harness.memory.cache.reset = lambda: (order.append("flush"), reset())
    d.ask("a", 100)
    d.turn(turns)
    order.clear()
    d.inbox += [AbortReq(abort_all=True), FlushCacheReq(call_id=1)]
    d.turn(2)
    assert d.replies[1].success
    assert order == ["absorb"] * isinstance(d.harness.loop, OverlapLoop) + ["flush"]
    d.ask("b", tokens=5)
    d.turn()
    d.harness.drain()
    d.check("b", tokens=5)


def test_the_state_tells_of_pauses_and_refusals(desk: Any) -> None:
    d = desk(max_running_requests=1, max_queued_requests=0)
    for rid in "abc":
        d.ask(rid, tokens=2)
    d.inbox += [PauseReq(call_id=1, mode="in_place"), InternalStateReq(call_id=2)]
    d.turn()
    assert d.replies[2].state["paused"] is True
    assert d.replies[2].state["num_refused"] == 2
