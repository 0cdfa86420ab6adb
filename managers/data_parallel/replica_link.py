"""The controller's sockets to and from the replicas.

Each run of a replica has sockets of its own: what a lost run still says is heard by nobody, and what had not left for it does not
reach the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import zmq

from ..io_struct import ToController
from ..ipc import IpcNames, Receiver, Sender


class ReplicaLink:
    """Of one run. On this machine it sends its output to the detokenizer itself; from another machine that comes here, over TCP."""

    def __init__(self, context: zmq.Context[Any], ipc: IpcNames) -> None:
        """ipc: the run's; of TCP addresses the port may be ``*``."""
        self.heard = time.monotonic()  # when it spoke last
        self.replies: Receiver[Any] = Receiver(context, ipc.tokenizer, ToController, ipc.token)
        self.outputs: Receiver[Any] | None = None
        self.ipc = msgspec.structs.replace(ipc, tokenizer=self.replies.address)  # with ports
        if ipc.detokenizer.startswith("tcp:"):
            self.outputs = Receiver(context, ipc.detokenizer, Any, ipc.token)
            self.ipc = msgspec.structs.replace(self.ipc, detokenizer=self.outputs.address)
        self._context = context
        self._sender: Sender | None = None

    def connect(self, address: str) -> None:
        """The replica listens there, and may be sent messages from now on."""
        self._sender = Sender(self._context, address, self.ipc.token)
        self.heard = time.monotonic()

    def send(self, message: Any) -> None:
        """Queue a message for a replica that is connected."""
        if self._sender is None:
            raise RuntimeError("the replica is not connected")
        self._sender.send(message)

    def receive_all(self) -> list[Any]:
        """What it has answered."""
        replies = self.replies.receive_all()
        if replies:
            self.heard = time.monotonic()
        return replies

    def receive_output(self) -> Iterable[bytes]:
        """Encoded output for the detokenizer."""
        return self.outputs.receive_bytes() if self.outputs else ()

    @property
    def receivers(self) -> Iterator[Receiver[Any]]:
        yield self.replies
        if self.outputs:
            yield self.outputs

    def close(self) -> None:
        """The run is over."""
        if self._sender:
            self._sender.close(linger=False)
        for receiver in self.receivers:
            receiver.close()


class ReplicaLinks:
    """The links of all replicas, and a poller that is told of them."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.poller = zmq.Poller()
        self._context = context
        self._links: dict[int, ReplicaLink] = {}

    def __getitem__(self, index: int) -> ReplicaLink:
        return self._links[index]

    def items(self) -> list[tuple[int, ReplicaLink]]:
        """By number of the replica."""
        return sorted(self._links.items())

    def renew(self, index: int, ipc: IpcNames) -> IpcNames:
        """Hear only the next run of a replica from now on; its addresses."""
        old = self._links.pop(index, None)
        if old:
            for receiver in old.receivers:
                self.poller.unregister(receiver.socket)
            old.close()
        link = self._links[index] = ReplicaLink(self._context, ipc)
        for receiver in link.receivers:
            self.poller.register(receiver.socket, zmq.POLLIN)
        return link.ipc
