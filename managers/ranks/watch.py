"""Signs of life between ranks, on a thread of its own: a rank that is silent for too long, or says that it failed, ends this one.

The machine that a rank runs on may be gone, or cut off, or its process stopped: then no socket is closed and no collective returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from .io import Beat, Failure, Signs, encode, follower_socket, identity, leader_socket

logger = logging.getLogger(__name__)

BEAT_INTERVAL = 1.0


class RankWatch:
    """Exchanges beats with the other ranks: rank 0 with all, the others with rank 0."""

    def __init__(self, address: str, token: str, *, rank: int, size: int, limit: float, fatal: Callable[[str], None]) -> None:
        """limit: seconds of silence. fatal(why) is called on the watch's thread, once, and ends the process."""
        self._address, self._token = address, token
        self._rank, self._size, self._limit = rank, size, limit
        self._fatal = fatal
        self._stopped = threading.Event()
        self._failure = ""
        self._heard: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def start(self) -> None:
        """The others count as heard of now."""
        self._thread.start()

    def stop(self, failure: str = "") -> None:
        """Watch no more; with a failure the others are told of it. Waits for the thread."""
        self._failure = failure
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(3 * BEAT_INTERVAL)

    def _watch(self) -> None:
        context = zmq.Context()
        try:
            leads = self._rank == 0
            others = range(1, self._size) if leads else range(1)
            self._heard = dict.fromkeys(others, time.monotonic())
            socket = (
                leader_socket(context, self._address, self._token)
                if leads
                else follower_socket(context, self._address, self._token, self._rank)
            )
            while not self._stopped.is_set():
                self._send(socket, Beat(rank=self._rank))
                why = self._listen(socket, time.monotonic() + BEAT_INTERVAL)
                if why and not self._stopped.is_set():
                    self._send(socket, Failure(rank=self._rank, why=why))
                    context.destroy(linger=2000)
                    self._fatal(why)
                    return
            if self._failure:
                self._send(socket, Failure(rank=self._rank, why=self._failure))
        finally:
            context.destroy(linger=2000)

    def _send(self, socket: zmq.Socket[Any], sign: Beat | Failure) -> None:
        data = encode(sign)
        if self._rank:
            socket.send(data)
            return
        for other in range(1, self._size):
            socket.send_multipart((identity(other), data))

    def _listen(self, socket: zmq.Socket[Any], until: float) -> str:
        """Take signs in until then; why this rank must end, or nothing."""
        decoder = msgspec.msgpack.Decoder(Signs)
        while (left := until - time.monotonic()) > 0 and not self._stopped.is_set():
            if not socket.poll(round(min(left, 0.2) * 1000)):
                continue
            sign: Beat | Failure = decoder.decode(socket.recv_multipart()[-1])
            if isinstance(sign, Failure):
                return f"rank {sign.rank} failed: {sign.why}"
            self._heard[sign.rank] = time.monotonic()
        now = time.monotonic()
        silent = {rank: now - heard for rank, heard in self._heard.items() if now - heard > self._limit}
        return "; ".join(f"rank {rank} gave no sign of life for {seconds:.0f} s" for rank, seconds in silent.items())
