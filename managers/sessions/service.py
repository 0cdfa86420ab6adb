"""SessionService: the sessions of a running engine. Adds a clock to the controller, and what follows: messages and aborts."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from ..config import TokenizerManagerConfig
from ..errors import RequestError
from ..io_struct import FinishReason, GenerateReq, ReleaseHoldReq, unpack_ids
from ..request_plan import RequestPlan
from .sessions import OpenSession, Session, SessionController

REAP_INTERVAL = 1.0  # seconds


class SessionService:
    """Used on one event loop. ``abort`` takes rids that a turn replaces."""

    def __init__(
        self, config: TokenizerManagerConfig, *, abort: Callable[[list[str]], None], send: Callable[[ReleaseHoldReq], None]
    ) -> None:
        self._controller = SessionController(config.max_sessions)
        self._streaming = config.streaming_sessions
        self._abort = abort
        self._send = send
        self._timer: asyncio.TimerHandle | None = None

    def open(self, request: OpenSession) -> str:
        """The id of a new session. Raises RequestError."""
        if request.streaming and not self._streaming:
            raise RequestError(
                "streaming: the server keeps no KV between requests (--disable-radix-cache), so no session can hold any.",
                param="streaming",
            )
        session_id = uuid.uuid4().hex if request.session_id is None else request.session_id
        self._reap()
        self._controller.open(session_id, request, time.monotonic())
        self._schedule()
        return session_id

    def close(self, session_id: str) -> None:
        """Raises RequestError for an unknown id. A turn under way may end first."""
        self._ended(self._controller.close(session_id))

    def begin(self, plan: RequestPlan) -> None:
        """Find what the request continues, if it belongs to a session. Raises RequestError."""
        if plan.session is not None:
            self._reap()
            plan.turn = self._controller.begin(plan.session, plan.rids[0], time.monotonic())

    def commit(self, plan: RequestPlan, messages: list[GenerateReq]) -> None:
        """The request is valid and tokenised: make it a turn. Raises RequestError if the session is full."""
        if plan.turn is None:
            return
        (message,) = messages
        if plan.turn.session.streaming:
            message.session_hold = plan.turn.session.id
        self._abort(self._controller.commit(plan.turn, unpack_ids(message.input_ids)[plan.turn.history_len :]))

    def cancel(self, plan: RequestPlan) -> None:
        """The request is refused after ``begin``."""
        if plan.turn is not None:
            self._ended(self._controller.cancel(plan.turn, time.monotonic()))

    def take(self, rid: str, token_ids: list[int], reason: FinishReason | None) -> None:
        """Output of any request; before its client sees it, so that the next turn finds this one finished."""
        self._controller.add_output(rid, token_ids)
        if reason is not None:
            aborted = reason.kind == "abort"
            failed = aborted and reason.status_code is not None
            self._ended(self._controller.finish(rid, time.monotonic(), failed=failed, aborted=aborted))

    def stop(self) -> None:
        """No more time-outs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reap(self) -> None:
        self._ended(self._controller.reap(time.monotonic()))

    def _schedule(self) -> None:
        if self._timer is None and len(self._controller):
            self._timer = asyncio.get_running_loop().call_later(REAP_INTERVAL, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._reap()
        self._schedule()

    def _ended(self, sessions: list[Session]) -> None:
        for session in sessions:
            if session.streaming:
                self._send(ReleaseHoldReq(session=session.id))
