"""Where a scheduler's messages come from.

Alone it takes what has arrived (ipc.Receiver); as rank 0 of several it hands that on; any other rank takes what rank 0 hands on and
nothing else, so that all of them decide alike.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from .decisions.log import NoDisguise, Turn, TurnSink
from .errors import StartError
from .io_struct import ToScheduler
from .ipc import Receiver
from .ranks.io import Hello, ToFollower, ToLeader, TurnMessages, TurnSeen, encode, follower_socket, identity, leader_socket

logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 1800.0  # seconds that the slowest rank may take longer to load than the fastest
SILENCE = 600.0  # seconds without a turn of rank 0; its watch speaks up long before


class RanksDifferError(RuntimeError):
    """Two ranks took different decisions."""


class Inbox(Protocol):
    """A scheduler's messages."""

    def wait(self, timeout: float) -> bool:
        """Sleep until a message is here or ``timeout`` seconds are over; says which."""

    def take(self, own: Callable[[], list[ToScheduler]]) -> list[ToScheduler]:
        """What this turn takes in. own: what this rank has to say itself."""


class LeaderInbox:
    """Rank 0's: what it takes in, all take in. With ``check`` it compares what they decided."""

    def __init__(self, receiver: Receiver[ToScheduler], context: zmq.Context[Any], address: str, token: str, size: int) -> None:
        self.wait = receiver.wait
        self.num_turns = 0  # handed on
        self.seconds = 0.0  # spent on that
        self.check: TurnCheck | None = None
        self._receiver = receiver
        self._followers = [identity(rank) for rank in range(1, size)]
        self._socket = leader_socket(context, address, token)
        self._decoder = msgspec.msgpack.Decoder(ToLeader)

    def meet(self, options: dict[str, str], timeout: float = HELLO_TIMEOUT) -> None:
        """Wait until all ranks are there. Raises StartError if one is late or was started with other options."""
        deadline, missing = time.monotonic() + timeout, set(range(1, len(self._followers) + 1))
        while missing:
            if not self._socket.poll(round(max(deadline - time.monotonic(), 0) * 1000)):
                raise StartError(f"rank {min(missing)} did not come within {timeout:.0f} s")
            message = self._receive()
            if not isinstance(message, Hello):
                continue
            different = sorted(name for name in options if options[name] != message.options.get(name))
            if different:
                raise StartError(f"rank {message.rank} was started with another {', '.join(different)} than rank 0")
            missing.discard(message.rank)

    def take(self, own: Callable[[], list[ToScheduler]]) -> list[ToScheduler]:
        messages = self._receiver.take(own)
        begin = time.perf_counter()
        data = encode(TurnMessages(messages=messages))
        for follower in self._followers:
            self._socket.send_multipart((follower, data))
        self.num_turns += 1
        self.seconds += time.perf_counter() - begin
        if self.check:
            while self._socket.poll(0):
                seen = self._receive()
                if isinstance(seen, TurnSeen):
                    self.check.compare(seen)
        return messages

    def _receive(self) -> ToLeader:
        return self._decoder.decode(self._socket.recv_multipart()[1])


class FollowerInbox:
    """The inbox of any other rank."""

    def __init__(self, context: zmq.Context[Any], address: str, token: str, rank: int) -> None:
        self._rank = rank
        self._socket = follower_socket(context, address, token, rank)
        self._decoder = msgspec.msgpack.Decoder(ToFollower)

    def meet(self, options: dict[str, str]) -> None:
        """Tell rank 0 that this one is there."""
        self._socket.send(encode(Hello(rank=self._rank, options=options)))

    def wait(self, timeout: float) -> bool:
        """It is rank 0 that sleeps."""
        return False

    def take(self, own: Callable[[], list[ToScheduler]]) -> list[ToScheduler]:
        if not self._socket.poll(round(SILENCE * 1000)):
            raise RuntimeError(f"rank 0 has begun no turn for {SILENCE:.0f} s")
        return self._decoder.decode(self._socket.recv()).messages

    def tell(self, turn: Turn) -> None:
        """Send rank 0 what was decided in a turn."""
        self._socket.send(encode(TurnSeen(rank=self._rank, turn=turn.number, parts=parts_of(turn))))


class TurnCheck:
    """Rank 0's turns until every other rank has told the same of them."""

    def __init__(self, size: int) -> None:
        self._others = size - 1
        self._turns: deque[tuple[int, dict[str, bytes]]] = deque()
        self._early: list[TurnSeen] = []  # of turns that are not over here
        self._agreed: dict[int, int] = {}
        self.num_agreed = 0  # turns on which all agree

    def add(self, turn: Turn) -> None:
        """A turn of rank 0 is over."""
        self._turns.append((turn.number, parts_of(turn)))
        early, self._early = self._early, []
        for seen in early:
            self.compare(seen)

    def compare(self, seen: TurnSeen) -> None:
        """Raises RanksDifferError, which names the first difference."""
        if not self._turns or seen.turn > self._turns[-1][0]:
            self._early.append(seen)
            return
        if seen.turn < self._turns[0][0]:
            raise RanksDifferError(f"rank {seen.rank} told of turn {seen.turn} twice")
        own = self._turns[seen.turn - self._turns[0][0]][1]
        for name, value in own.items():
            if seen.parts.get(name) != value:
                raise RanksDifferError(
                    f"rank {seen.rank} and rank 0 differ in turn {seen.turn}, first in its {name}: "
                    f"{_show(seen.parts.get(name, b''))} there, {_show(value)} here"
                )
        self._agreed[seen.turn] = self._agreed.get(seen.turn, 0) + 1
        while self._turns and self._agreed.get(self._turns[0][0], 0) == self._others:
            self._agreed.pop(self._turns.popleft()[0])
            self.num_agreed += 1


def _show(data: bytes) -> str:
    text = msgspec.json.encode(msgspec.msgpack.decode(data)).decode() if data else "nothing"
    return text if len(text) <= 300 else text[:300] + "..."


NOBODYS = -9  # instead of an id whose row has a new owner: its step read a row that was being written
PARTS = ("messages", "batch", "error", "ids", "finished", "retracted", "jumps")


def parts_of(turn: Turn) -> dict[str, bytes]:
    """What is compared of a turn, in the order in which it is decided."""
    record = turn.record(NoDisguise())
    if turn.ids is not None and turn.owned is not None:
        record.ids = np.where(turn.owned, turn.ids, NOBODYS).tolist()
    return {name: msgspec.msgpack.encode(getattr(record, name)) for name in PARTS}


class CheckedSink(TurnSink):
    """Shows each turn to the check, and hands it on."""

    def __init__(self, sink: TurnSink, show: Callable[[Turn], None]) -> None:
        self._sink = sink
        self._show = show

    def put(self, turn: Turn) -> None:
        self._show(turn)
        self._sink.put(turn)

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        self._sink.close()
