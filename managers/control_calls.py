"""Calls to the scheduler that are answered: each reply finds the caller with its call_id."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from .errors import EngineDeadError
from .io_struct import ControlReply, Message


class ControlCalls:
    """Any number of calls may be under way at once."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ControlReply]] = {}

    async def call(self, make: Callable[[int], Message]) -> ControlReply:
        """Send what ``make`` makes of a fresh call_id and wait for its reply; EngineDeadError if the scheduler dies meanwhile."""
        call_id = next(self._ids)
        reply: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = reply
        try:
            self._send(make(call_id))
            return await reply
        finally:
            del self._waiting[call_id]

    def take(self, reply: ControlReply) -> None:
        """Hand a reply to its caller, if that still waits."""
        waiter = self._waiting.get(reply.call_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def fail(self, make_error: Callable[[], EngineDeadError]) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(make_error())
