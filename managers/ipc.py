"""Sockets between the processes: ZMQ over ipc:// in a private directory, msgspec messages, nothing ever unpickled.

A link has one reader, which binds, and any number of writers, which connect.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 107 with the terminator

T = TypeVar("T")


class IpcNames(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of one engine's sockets, named after their reader."""

    directory: str
    scheduler: str
    detokenizer: str
    tokenizer: str

    @classmethod
    def create(cls) -> IpcNames:
        """Make a fresh directory, mode 0700, and name the sockets in it. ``remove`` deletes it."""
        directory = tempfile.mkdtemp(prefix="banyan-")
        if len(os.fsencode(directory)) > MAX_SOCKET_PATH - len("/detokenizer"):
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix="banyan-", dir="/tmp")
        names = {name: f"ipc://{directory}/{name}" for name in ("scheduler", "detokenizer", "tokenizer")}
        return cls(directory=directory, **names)

    def remove(self) -> None:
        """Delete the directory and the socket files in it. Idempotent."""
        shutil.rmtree(self.directory, ignore_errors=True)


class Sender:
    """The writing end of a link. Not safe to share between threads."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; never blocks."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[T]):
    """The reading end of a link; ``message_types`` is the union of what may arrive."""

    def __init__(self, context: zmq.Context[Any], address: str, message_types: Any) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(message_types)

    def receive_all(self) -> list[T]:
        """All messages that are here now; never blocks."""
        messages: list[T] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def wait(self, timeout: float) -> bool:
        """Sleep until a message is here or ``timeout`` seconds are over; says which."""
        return bool(self._socket.poll(round(timeout * 1000)))

    def close(self) -> None:
        self._socket.close()


class AsyncReceiver(Generic[T]):
    """The reading end of a link for an asyncio loop."""

    def __init__(self, context: zmq.asyncio.Context, address: str, message_types: Any) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(message_types)

    async def receive(self) -> T:
        """The next message."""
        message: T = self._decoder.decode(await self._socket.recv())
        return message

    def close(self) -> None:
        self._socket.close()
