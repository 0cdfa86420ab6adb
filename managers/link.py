"""Link: the tokenizer manager's sockets and the task that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from .io_struct import ShutdownReq, TextOutput, ToTokenizer
from .ipc import AsyncReceiver, IpcNames, Sender


class Link:
    """On the running asyncio loop. What arrives goes to ``take``; ``ended`` is told why reading stopped, unless by ``close``."""

    def __init__(self, ipc: IpcNames, take: Callable[[Any], None], ended: Callable[[BaseException | None], None]) -> None:
        self._ipc = ipc
        self._take = take
        self._ended = ended
        self._context = zmq.Context()
        shadow = zmq.asyncio.Context.shadow(self._context.underlying)
        self._receiver: AsyncReceiver[ToTokenizer] = AsyncReceiver(shadow, ipc.tokenizer, ToTokenizer)
        self._sender = Sender(self._context, ipc.scheduler)
        self.loop = asyncio.get_running_loop()
        self._reading = self.loop.create_task(self._read())
        self._reading.add_done_callback(self._done)

    async def _read(self) -> None:
        while True:
            message = await self._receiver.receive()
            self._take(message)
            if isinstance(message, TextOutput):
                await asyncio.sleep(0)  # receiving does not yield while messages queue up; consumers must have their turn

    def _done(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for the reading task: if it fails, all requests must know."""
        if not task.cancelled():
            self._ended(task.exception())

    def send(self, message: msgspec.Struct) -> None:
        """To the scheduler."""
        self._sender.send(message)

    def send_shutdown(self) -> None:
        """Tell scheduler and detokenizer to exit."""
        self._sender.send(ShutdownReq())
        to_detokenizer = Sender(self._context, self._ipc.detokenizer)
        to_detokenizer.send(ShutdownReq())
        to_detokenizer.close()

    async def close(self, *, linger: bool = True) -> None:
        """Stop reading and close. linger: what was sent gets a moment to leave, if its reader has gone; else it is dropped."""
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._sender.close(linger=linger)
        self._receiver.close()
        self._context.term()
