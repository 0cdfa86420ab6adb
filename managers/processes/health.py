"""Health from heartbeats: whether the scheduler's loop turns, without asking it to generate anything."""

from __future__ import annotations

import time

import msgspec

from ..io_struct import Heartbeat

STALE = 20.0  # seconds without a heartbeat, or without a turn of a loop that has no forward pass under way
MAX_FORWARD = 300.0  # seconds of one forward pass


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """alive: the loops turn; ready: new requests are taken; reason says why not. Ages are in seconds."""

    alive: bool
    ready: bool
    reason: str
    heartbeat_age: float
    forward_age: float
    num_running: int
    num_waiting: int
    num_used_tokens: int = 0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    replicas: dict[int, Heartbeat] = {}  # those that are up, by number


class HealthMonitor:
    """Keeps the newest heartbeat."""

    def __init__(self) -> None:
        self._last = Heartbeat(loop_age=0.0, forward_age=0.0, num_running=0, num_waiting=0)
        self._received = time.monotonic()

    def take(self, heartbeat: Heartbeat) -> None:
        self._last = heartbeat
        self._received = time.monotonic()

    def hangs(self, limit: float) -> str:
        """Why the scheduler counts as hung, if it has been silent, or in one forward pass, for ``limit`` seconds; else ""."""
        last, age = self._last, time.monotonic() - self._received
        if age > limit:
            return f"no heartbeat of the scheduler for {age:.0f} s"
        if last.forward_age > limit:
            return f"a forward pass takes {last.forward_age:.0f} s"
        if last.loop_age > limit and not last.forward_age:
            return f"the scheduler's loop stands still for {last.loop_age:.0f} s"
        return ""

    def health(self, *, dead: str = "", draining: bool = False, restarting: bool = False) -> Health:
        """``dead`` says why the engine is known to be dead, if it is. restarting: its processes are being started again."""
        last, age = self._last, time.monotonic() - self._received
        if dead:
            alive, reason = False, dead
        elif restarting:
            alive, reason = True, "restarting"
        elif age > STALE:
            alive, reason = False, f"no heartbeat of the scheduler for {age:.0f} s"
        elif last.forward_age > MAX_FORWARD:
            alive, reason = False, f"a forward pass takes {last.forward_age:.0f} s"
        elif last.loop_age > STALE and not last.forward_age:
            alive, reason = False, f"the scheduler's loop stands still for {last.loop_age:.0f} s"
        else:
            alive, reason = True, "draining" if draining else ""
        return Health(
            alive=alive,
            ready=alive and not draining and not restarting,
            reason=reason,
            heartbeat_age=age,
            forward_age=last.forward_age,
            num_running=last.num_running,
            num_waiting=last.num_waiting,
            num_used_tokens=last.num_used_tokens,
            gen_throughput=last.gen_throughput,
            cache_hit_rate=last.cache_hit_rate,
            replicas=last.replicas or {0: last},
        )
