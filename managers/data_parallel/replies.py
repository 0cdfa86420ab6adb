"""One answer out of those of several replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..io_struct import ControlReply, ExplainCacheReq, Heartbeat, ReadWeightReq, SchedulerReport

MEANS = (
    "token_usage",
    "full_token_usage",
    "new_token_ratio",
    "hit_rate",
    "cache_hit_rate",
    "utilization",
    "is_cuda_graph",
)  # not sums
MOST = (
    "page_size",
    "queue_stuck_seconds",
    "weight_load_seconds",
    "weights_released",
    "memory_released",
)  # nor of these: what the largest is


@dataclass(slots=True)
class Call:
    """A control message that was sent to replicas, and what has come back."""

    message: Any
    waiting: set[int]
    replies: dict[int, ControlReply] = field(default_factory=dict)

    def merged(self) -> ControlReply:
        """The answer: a failure if any replica failed or none answered."""
        replies = [self.replies[index] for index in sorted(self.replies)]
        texts = list(dict.fromkeys(reply.message for reply in replies if reply.message))
        failures = [reply.message for reply in replies if not reply.success]
        success = bool(replies) and not failures
        return ControlReply(
            call_id=self.message.call_id,
            success=success,
            message="; ".join(failures or texts) if replies else "No replica answered.",
            state=self._state(),
        )

    def _state(self) -> dict[str, Any]:
        states = {index: reply.state for index, reply in sorted(self.replies.items()) if reply.state}
        if not states:
            return {}
        if isinstance(self.message, ExplainCacheReq):
            best = max(states, key=lambda index: states[index]["would_hit"])
            return {**states[best], "dp_rank": best}
        if isinstance(self.message, ReadWeightReq):  # all have the same weights
            return next(iter(states.values()))
        merged = merge_states(list(states.values()))
        merged["replicas"] = [{"dp_rank": index, **state} for index, state in states.items()]
        return merged


def _merged(name: str, values: list[float]) -> float:
    if name in MEANS:
        return round(sum(values) / len(values), 4)
    return max(values) if name.partition(" ")[0] in MOST else sum(values)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of numbers (means of shares, the largest of sizes), all of flags, lists one after the other; else the first."""
    merged: dict[str, Any] = {}
    for name, first in states[0].items():
        values = [state[name] for state in states if name in state]
        if isinstance(first, bool):
            merged[name] = all(values)
        elif isinstance(first, int | float):
            merged[name] = _merged(name, values)
        elif isinstance(first, list):
            merged[name] = [item for value in values for item in value]
        else:
            merged[name] = first
    return merged


NO_BEAT = Heartbeat(loop_age=0.0, forward_age=0.0, num_running=0, num_waiting=0)


def merge_heartbeats(by_replica: dict[int, Heartbeat]) -> Heartbeat:
    """Of the replicas that are up: the engine turns as long as one of them does."""
    beats = list(by_replica.values())
    if not beats:
        return NO_BEAT
    liveliest = min(beats, key=lambda beat: max(beat.loop_age, beat.forward_age))
    return Heartbeat(
        loop_age=liveliest.loop_age,
        forward_age=liveliest.forward_age,
        num_running=sum(beat.num_running for beat in beats),
        num_waiting=sum(beat.num_waiting for beat in beats),
        num_used_tokens=sum(beat.num_used_tokens for beat in beats),
        gen_throughput=sum(beat.gen_throughput for beat in beats),
        cache_hit_rate=sum(beat.cache_hit_rate for beat in beats) / len(beats),
        replicas=by_replica,
    )


@dataclass(slots=True)
class Reports:
    """The reports of replicas as one. Counters go on when a replica is lost and begins again from zero."""

    past: dict[str, float] = field(default_factory=dict)  # counters of replicas that were lost

    def lost(self, report: SchedulerReport | None) -> None:
        """This was the last one of a replica."""
        for name, value in (report.counters if report else {}).items():
            self.past[name] = self.past.get(name, 0.0) + value

    def merged(self, reports: list[SchedulerReport]) -> SchedulerReport:
        """Sums, but means of shares."""
        gauges = merge_states([{name: float(value) for name, value in report.gauges.items()} for report in reports])
        counters = dict(self.past)
        for report in reports:
            for name, value in report.counters.items():
                counters[name] = counters.get(name, 0.0) + value
        return SchedulerReport(gauges=gauges, counters=counters)
