"""TokenizerManager: the front of the engine. Text and parameters in, checked requests to the scheduler, text out to whoever asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from .config import SchedulerInfo, TokenizerManagerConfig
from .errors import EngineDeadError
from .generation import GenerateInput, Generation
from .io_struct import ControlReply


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """alive: the loops turn; ready: new requests are taken; reason says why not. Ages are in seconds."""

    alive: bool
    ready: bool
    reason: str
    heartbeat_age: float
    forward_age: float
    num_running: int
    num_waiting: int


class TokenizerManager:
    """Lives on one asyncio loop; ``start_loop`` must be called on it first. Only ``fail`` may be called from other threads."""

    def __init__(self, config: TokenizerManagerConfig, info: SchedulerInfo) -> None:
        self.config = config
        self.info = info
        self.draining = False  # new requests get a 503

    def start_loop(self) -> None:
        """Bind the receiving socket on the running loop."""
        raise NotImplementedError

    async def start(self, request: GenerateInput) -> Generation:
        """Check, tokenise and send a request. Raises RequestError before anything is sent, EngineDeadError after a death."""
        raise NotImplementedError

    async def generate(self, request: GenerateInput) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer as the JSON of the native /generate."""
        raise NotImplementedError

    def stream(self, generation: Generation, request: GenerateInput) -> AsyncIterator[dict[str, Any]]:
        """The JSON chunks of the native /generate. Closing it early aborts."""
        raise NotImplementedError

    def abort(self, rid: str, abort_all: bool = False) -> int:
        """Abort the request with this rid, or those it was expanded to; says how many choices."""
        raise NotImplementedError

    async def flush_cache(self, timeout: float = 0.0) -> ControlReply:
        """Empty the prefix cache, waiting up to ``timeout`` seconds for the scheduler to be idle."""
        raise NotImplementedError

    async def internal_state(self) -> dict[str, Any]:
        """The scheduler's state."""
        raise NotImplementedError

    def health(self) -> Health:
        """From heartbeats; costs no request."""
        raise NotImplementedError

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is live; False when ``timeout`` seconds passed."""
        raise NotImplementedError

    def fail(self, error: EngineDeadError) -> None:
        """Give every waiter, and every later call, this error. From any thread."""
        raise NotImplementedError

    def begin_shutdown(self) -> None:
        """Tell the other processes to exit; waiters get EngineDeadError. They may still send until ``close``."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the sockets and the thread pool. Idempotent."""
        raise NotImplementedError
