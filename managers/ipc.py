"""Sockets between the processes: ZMQ over ipc:// in a private directory, msgspec messages, nothing ever unpickled.

A link has one reader, which binds, and any number of writers, which connect. Between machines links are TCP with CURVE keys that
follow from a shared token, so that who does not know the token can neither speak nor read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.z85

MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 107 with the terminator
PREFIX = "banyan-"

_locks: dict[str, int] = {}  # descriptors of the locks that this process holds, by directory

T = TypeVar("T")


class IpcNames(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of one engine's sockets, named after their reader. token: the secret of those that are TCP. borrowed: the directory
    outlives the parent of who reads this, as that of a controller of replicas does."""

    directory: str
    scheduler: str
    detokenizer: str
    tokenizer: str
    token: str = ""
    borrowed: bool = False

    @classmethod
    def create(cls) -> IpcNames:
        """Make a fresh directory, mode 0700, and name the sockets in it. ``remove`` deletes it.

        What engines that were killed with all their processes left behind is deleted first: this process holds a lock in its
        directory as long as it lives, so a lock that can be taken is a dead engine's.
        """
        directory = tempfile.mkdtemp(prefix=PREFIX)
        if len(os.fsencode(directory)) > MAX_SOCKET_PATH - len("/detokenizer"):
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
        _sweep(Path(directory).parent)
        _lock(directory)
        scheduler, detokenizer, tokenizer = (f"ipc://{directory}/{name}" for name in ("scheduler", "detokenizer", "tokenizer"))
        return cls(directory=directory, scheduler=scheduler, detokenizer=detokenizer, tokenizer=tokenizer)

    def remove(self) -> None:
        """Delete the directory and the socket files in it. Idempotent."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.directory in _locks:
            os.close(_locks.pop(self.directory))


def _lock(directory: str) -> None:
    """Hold a lock in the directory until this process ends. It gets its name when it is held, so nobody finds it free before."""
    draft = os.path.join(directory, "draft")
    lock = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(draft, os.path.join(directory, "lock"))
    _locks[directory] = lock


def _sweep(parent: Path) -> None:
    """Delete the directories of dead engines of this user."""
    for directory in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # somebody else deletes it, or it is another user's
            if directory.lstat().st_uid == os.getuid() and _is_dead(directory):
                shutil.rmtree(directory, ignore_errors=True)


def _is_dead(directory: Path) -> bool:
    """Raises OSError if there is no lock to ask."""
    lock = os.open(directory / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def curve_keys(token: str) -> tuple[bytes, bytes]:
    """(public, secret) that follow from a token."""
    secret: bytes = zmq.utils.z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=b"banyan-ranks").digest())
    return zmq.curve_public(secret), secret


def guard_binding(socket: zmq.Socket[Any], token: str) -> None:
    """Only who knows the token may connect."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, curve_keys(token)[1])


def guard_connecting(socket: zmq.Socket[Any], token: str) -> None:
    """Speak only with who knows the token."""
    own_public, own_secret = zmq.curve_keypair()
    socket.set(zmq.CURVE_SERVERKEY, curve_keys(token)[0])
    socket.set(zmq.CURVE_PUBLICKEY, own_public)
    socket.set(zmq.CURVE_SECRETKEY, own_secret)


class Sender:
    """The writing end of a link. Not safe to share between threads."""

    def __init__(self, context: zmq.Context[Any], address: str, token: str = "") -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 1000)
        if address.startswith("tcp:"):
            guard_connecting(self._socket, token)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; never blocks."""
        self.send_bytes(self._encoder.encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Queue an encoded message; never blocks."""
        self._socket.send(data, zmq.NOBLOCK)

    def close(self, *, linger: bool = True) -> None:
        """Close; without ``linger`` what has not left yet is dropped."""
        self._socket.close(None if linger else 0)


class Receiver(Generic[T]):
    """The reading end of a link; ``message_types`` is the union of what may arrive."""

    def __init__(self, context: zmq.Context[Any], address: str, message_types: Any, token: str = "") -> None:
        self._socket: zmq.Socket[Any] = context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        if address.startswith("tcp:"):
            guard_binding(self._socket, token)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(message_types)

    @property
    def socket(self) -> zmq.Socket[Any]:
        """To be polled."""
        return self._socket

    @property
    def address(self) -> str:
        """Where it is bound, with the port that a wildcard became."""
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def receive_all(self) -> list[T]:
        """All messages that are here now; never blocks."""
        return [self._decoder.decode(data) for data in self.receive_bytes()]

    def receive_bytes(self) -> Iterator[bytes]:
        """The same, as they came."""
        while True:
            try:
                yield self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def take(self, own: Callable[[], list[T]]) -> list[T]:
        """The messages that are here, behind what the caller has to say itself."""
        return [*own(), *self.receive_all()]

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
