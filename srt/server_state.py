"""What the routes share: the options, the engine once it stands, and the phase of the server's life."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from ..managers.chat_template import ChatTemplate
from ..managers.errors import RequestError
from ..managers.model_service import ModelService
from ..managers.processes.start_clock import StartClock
from ..managers.request_gate import QUEUE_FULL_MESSAGE
from .http_metrics import HttpCounts

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..managers.tokenizer_manager import TokenizerManager
    from .server_args import ServerArgs


class ServerState:
    """starting (until the warm-up is over) -> ready -> draining."""

    def __init__(self, args: ServerArgs, clock: StartClock | None = None) -> None:
        self.args = args
        self.tm: TokenizerManager | None = None
        self.chat_template: ChatTemplate | None = None
        self.created = int(time.time())
        self.startup_time: float | None = None
        self.http_counts = HttpCounts()
        self.clock = clock or StartClock()
        self.leaving = False  # a signal came: there is no way back from draining
        self.processes: Callable[[], dict[str, int]] | None = None  # pids of the children by name
        self._begin = time.monotonic()
        self._warm = False
        self._models: ModelService | None = None

    def attach(self, tm: TokenizerManager) -> None:
        """The engine stands. Raises StartError for a chat template that does not compile."""
        self.chat_template = ChatTemplate.of(tm.tokenizer, tm.config.chat_template)
        self.tm = tm
        self._models = ModelService(tm)

    @property
    def phase(self) -> Literal["starting", "ready", "draining"]:
        if self.tm is not None and self.tm.draining:
            return "draining"
        return "ready" if self._warm else "starting"

    def mark_ready(self) -> None:
        """The warm-up is over."""
        self._warm = True
        self.startup_time = time.monotonic() - self._begin

    def unserving_reason(self) -> str | None:
        """Why no requests are served now; None if they are, however many wait."""
        if self.tm is None or self.phase != "ready":
            return self.phase
        health = self.tm.health()
        return None if health.ready else health.reason

    def unready_reason(self) -> str | None:
        """Why new requests are not taken now; None if they are."""
        reason = self.unserving_reason()
        return QUEUE_FULL_MESSAGE if reason is None and self.tm is not None and self.tm.is_full else reason

    def engine(self) -> TokenizerManager:
        """The tokenizer manager. Raises RequestError 503 while there is none."""
        if self.tm is None:
            raise RequestError("The server is starting.", status_code=503, err_type="ServiceUnavailableError")
        return self.tm

    def model_service(self) -> ModelService:
        """For what trainers and developers ask. Raises RequestError 503 while there is no engine."""
        self.engine()
        if self._models is None:
            raise RequestError("The server is starting.", status_code=503, err_type="ServiceUnavailableError")
        return self._models

    def serving(self) -> TokenizerManager:
        """The tokenizer manager, for a new request. Raises RequestError 503 when none is taken."""
        tm = self.engine()
        if tm.draining:
            raise RequestError("The server is shutting down.", status_code=503, err_type="ServiceUnavailableError")
        return tm


def state_of(request: Request) -> ServerState:
    """The state of the app that serves the request."""
    state: ServerState = request.app.state.server
    return state
