"""The life of a server: start while it already answers probes, warm up, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from concurrent.futures import Future
from typing import Any

from ..managers.errors import EngineDeadError, StartError
from ..managers.generation import GenerateInput
from ..managers.processes import stacks
from ..managers.processes.no_pickle import forbid_unpickling
from ..managers.processes.start_clock import StartClock
from ..managers.tokenizer_manager import TokenizerManager
from . import tracing
from .http_server import create_app, make_server
from .launcher import Launched
from .leave import leave
from .server_args import ServerArgs
from .server_state import ServerState
from .supervisor import Supervisor

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60  # that open requests get to finish after the first signal
STOP_SECONDS = 10.0  # that the processes get to leave after that
DEATH_GRACE = 0.3  # seconds in which open requests are told that the engine has died
READY_MESSAGE = "The server is fired up and ready to roll!"  # launch scripts wait for exactly this line
WARM_UP_TEXT = "The capital city of France is"
WARM_UP_TOKENS = 8


class Life:
    """One run of the server, on one event loop."""

    def __init__(self, args: ServerArgs, sock: socket.socket, launching: Future[Launched], clock: StartClock) -> None:
        """sock is bound. launching: the engine's processes, on their way."""
        self._args = args
        self._sock = sock
        self._launching = launching
        self._state = ServerState(args, clock)
        self._server = make_server(create_app(self._state), args, DRAIN_SECONDS)
        self._launched: Launched | None = None
        self._death: EngineDeadError | None = None
        self._supervisor: Supervisor | None = None
        self._num_signals = 0
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until the end; the exit status. Raises StartError and EngineDeadError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        http = asyncio.ensure_future(self._listen())
        start = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait({http, start}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
            await http
        finally:
            self._server.stop(at_once=True)
            start.cancel()
            await asyncio.gather(http, start, return_exceptions=True)
            await self._stop_engine()
        if self._death is not None:
            raise self._death
        return 0

    async def _listen(self) -> None:
        host, port = self._sock.getsockname()[:2]
        try:
            await self._server.serve(sockets=[self._sock])
        except OSError as error:  # somebody else began to listen since the address was bound
            raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None

    async def _start(self) -> None:
        clock = self._state.clock
        launched = await asyncio.wrap_future(self._launching)
        self._launched = launched
        clock.lap("processes")
        stacks.install(launched.ipc.directory)
        forbid_unpickling()
        self._state.processes = launched.group.pids_by_name
        tm = await asyncio.to_thread(TokenizerManager, launched.manager_config, launched.info, launched.tokenizer)
        tracing.install(tm, self._args)
        self._state.attach(tm)
        tm.start_loop()
        clock.lap("tokenizer")
        loop = asyncio.get_running_loop()

        def on_death(error: EngineDeadError) -> None:
            tm.fail(error)
            loop.call_soon_threadsafe(self._died, error)

        self._supervisor = Supervisor(
            launched, tm, loop, budget=self._args.restarts, watchdog=self._args.watchdog_timeout, give_up=on_death
        )
        self._supervisor.start()
        if not self._args.skip_server_warmup:
            await _warm_up(tm)
        clock.lap("warm-up")
        self._supervisor.allow()
        self._state.mark_ready()
        host, port = self._sock.getsockname()[:2]
        log.info("Serving %s on http://%s:%d", tm.config.served_model_name, f"[{host}]" if ":" in host else host, port)
        log.info("Started in %s", clock)
        log.info(READY_MESSAGE)

    def _died(self, error: EngineDeadError) -> None:
        self._death = error
        log.error("%s", error)
        self._server.stop()
        asyncio.get_running_loop().call_later(DEATH_GRACE, lambda: self._server.stop(at_once=True))

    def _signalled(self, number: int) -> None:
        self._num_signals += 1
        name = signal.Signals(number).name
        if self._num_signals > 1:
            log.warning("%s again: ending at once", name)
            leave(128 + number)
        if self._launched is None or self._state.tm is None:
            log.info("%s while starting", name)
            leave(0)
        log.info("%s: draining, at most %d s", name, DRAIN_SECONDS)
        self._state.leaving = self._state.tm.draining = True
        self._draining = asyncio.ensure_future(self._drain(self._state.tm))

    async def _drain(self, tm: TokenizerManager) -> None:
        """Go on listening until what runs has finished: new requests are told 503 and may turn to another server."""
        deadline = time.monotonic() + DRAIN_SECONDS
        await tm.wait_idle(DRAIN_SECONDS)
        self._server.stop()
        await asyncio.sleep(deadline - time.monotonic())  # for clients that read slowly
        self._server.stop(at_once=True)

    async def _stop_engine(self) -> None:
        tm, launched = self._state.tm, self._launched
        if self._supervisor is not None:
            self._supervisor.stop()
        if tm is not None and self._death is None:
            tm.begin_shutdown()
        if launched is not None:
            told = tm is not None and self._death is None
            await asyncio.to_thread(launched.stop, STOP_SECONDS if told else 0.0)
        if tm is not None:
            await tm.close()


async def _warm_up(tm: TokenizerManager) -> None:
    """One request through all processes, then an empty cache again."""
    ids: list[int] = tm.tokenizer.encode(WARM_UP_TEXT)[: tm.info.max_req_input_len]
    room = max(0, min(tm.info.max_req_len, tm.info.model.context_len) - len(ids))
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": min(WARM_UP_TOKENS, room)}
    await tm.generate(GenerateInput(input_ids=ids, sampling_params=params), probe=True)
    await tm.flush_cache(timeout=1.0)
