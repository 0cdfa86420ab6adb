"""A scheduler's place among the ranks of its engine: where its messages come from, and whether anyone hears what it says."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from ...version import __version__
from ..config import SchedulerConfig
from ..decisions.log import TurnSink
from ..inbox import CheckedSink, FollowerInbox, Inbox, LeaderInbox, TurnCheck
from ..io_struct import ToScheduler
from ..ipc import Receiver, Sender
from .watch import RankWatch

Send = Callable[[Any], None]
OWN = {"ipc", "links", "runner", "tokenizer_path", "log_level", "record_decisions", "record_prompts", "crash_dump_folder"}
OWN_OF_RUNNER = {"ranks", "model_path"}  # may differ between ranks, like these of the scheduler


class RankGroup:
    """Rank 0 leads: it alone takes messages from outside and answers. Of a single scheduler nothing but that is left."""

    def __init__(self, config: SchedulerConfig, context: zmq.Context[Any]) -> None:
        spec, links = config.runner.ranks, config.links
        self.leads = spec.rank == 0
        self._config = config
        self._context = context
        self._watch: RankWatch | None = None
        self._leader: LeaderInbox | None = None
        self._follower: FollowerInbox | None = None
        ipc = config.ipc
        receiver = Receiver[ToScheduler](context, ipc.scheduler, ToScheduler, ipc.token) if self.leads else None
        self.inbox: Inbox
        if receiver is None:
            self.inbox = self._follower = FollowerInbox(context, links.turns, links.token, spec.rank)
        elif spec.world_size == 1:
            self.inbox = receiver
        else:
            self.inbox = self._leader = LeaderInbox(receiver, context, links.turns, links.token, spec.world_size)

    def sender(self, address: str) -> Send:
        """Sends to an address, if anyone is to hear this rank."""
        return Sender(self._context, address, self._config.ipc.token).send if self.leads else _silent

    def sender_of_any_thread(self, address: str) -> Send:
        """The same, for any thread. A socket belongs to one thread, so each gets one of its own."""
        if not self.leads:
            return _silent
        local = threading.local()

        def send(message: Any) -> None:
            if not hasattr(local, "sender"):
                local.sender = Sender(self._context, address, self._config.ipc.token)
            local.sender.send(message)

        return send

    def checked(self, sink: TurnSink) -> TurnSink:
        """The sink, with a look at each turn if decisions are to be compared."""
        if not self._config.links.check:
            return sink
        if self._follower:
            return CheckedSink(sink, self._follower.tell)
        if self._leader:
            self._leader.check = TurnCheck(self._config.runner.ranks.world_size)
            return CheckedSink(sink, self._leader.check.add)
        return sink

    def start(self, fatal: Callable[[str], None]) -> None:
        """Meet the other ranks and watch them from now on. fatal(why): one of them is lost. Raises StartError."""
        spec, links = self._config.runner.ranks, self._config.links
        if spec.world_size == 1:
            return
        self._watch = RankWatch(links.watch, links.token, rank=spec.rank, size=spec.world_size, limit=links.silence, fatal=fatal)
        if self._leader:
            self._leader.meet(digests(self._config))
        if self._follower:
            self._follower.meet(digests(self._config))
        self._watch.start()

    def failed(self, error: Exception) -> None:
        """Tell the others that this rank ends, and why."""
        if self._watch:
            self._watch.stop(f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        """The end of all ranks has been decided: their silence means nothing any more."""
        if self._watch:
            self._watch.stop()


def digests(config: SchedulerConfig) -> dict[str, str]:
    """Of each option that must be the same on all ranks, and of the version."""
    values = {name: getattr(config, name) for name in config.__struct_fields__ if name not in OWN}
    runner = config.runner
    values |= {name: getattr(runner, name) for name in runner.__struct_fields__ if name not in OWN_OF_RUNNER}
    values |= {"tp_size": runner.ranks.tp_size, "pp_size": runner.ranks.pp_size, "version": __version__}
    return {name: hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=8).hexdigest() for name, value in values.items()}


def _silent(message: Any) -> None:
    """Rank 0 says it."""
