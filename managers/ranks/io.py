"""Messages between the schedulers of one engine, and the sockets that they go through.

Rank 0 binds two sockets: one for the turns of the loop, one for signs of life, which a thread of its own exchanges. On one machine
they are files in the engine's private directory; between machines they are TCP ports with CURVE keys that follow from a shared
token, so that who does not know the token can neither speak nor read.
"""

from __future__ import annotations

import socket as socketlib
from typing import Any

import msgspec
import zmq

from ..io_struct import Message, ToScheduler
from ..ipc import guard_binding, guard_connecting


class Hello(Message):
    """A rank is loaded and listens. options: digests of what must be the same on all ranks, by name."""

    rank: int
    options: dict[str, str]


class TurnMessages(Message):
    """Rank 0: what the next turn of the loop takes in."""

    messages: list[ToScheduler]


class TurnSeen(Message):
    """What a rank decided in a turn: the parts of its record, by name."""

    rank: int
    turn: int
    parts: dict[str, bytes]


class Beat(Message):
    """I live, and have not left my loop for ``age`` seconds."""

    rank: int
    age: float = 0.0


class Failure(Message):
    """A rank has failed; the group must end."""

    rank: int
    why: str


ToLeader = Hello | TurnSeen
ToFollower = TurnMessages
Signs = Beat | Failure


def leader_socket(context: zmq.Context[Any], address: str, token: str) -> zmq.Socket[Any]:
    """Rank 0's end: a ROUTER, which names the others by their rank in two bytes."""
    socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
    _set_up(socket)
    socket.set(zmq.ROUTER_MANDATORY, 0)
    if token:
        guard_binding(socket, token)
    socket.bind(numeric(address))
    return socket


def numeric(address: str) -> str:
    """The address with a number instead of a host's name: a socket cannot be bound to a name."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not any(letter.isalpha() for letter in host) or ":" in host:
        return address
    return f"tcp://{socketlib.gethostbyname(host)}:{port}"


def follower_socket(context: zmq.Context[Any], address: str, token: str, rank: int) -> zmq.Socket[Any]:
    """The end of any other rank."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    _set_up(socket)
    socket.set(zmq.IDENTITY, identity(rank))
    if token:
        guard_connecting(socket, token)
    socket.connect(address)
    return socket


def identity(rank: int) -> bytes:
    """A rank's name on the sockets (ZMQ forbids a leading zero byte)."""
    return b"r%d" % rank


def _set_up(socket: zmq.Socket[Any]) -> None:
    for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500)):
        socket.set(option, value)


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)
