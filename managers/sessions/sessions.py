"""Sessions: conversations whose tokens the server remembers, so that a turn sends only what is new.

Pure: no clock, no sockets. A session is a tree of turns, each a child of the turn whose tokens it continues. A turn stores only
what it added: its own prompt ids, its output, and how many of its parent's tokens it began with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from ..errors import RequestError

NO_IDS = np.empty(0, np.int32)
MAX_ID_LEN = 256


class SessionParams(msgspec.Struct, kw_only=True):
    """Which turn of which session a request continues; see ``SessionController.begin``."""

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None

    @classmethod
    def parse(cls, values: Any) -> SessionParams:
        """From decoded JSON; unknown names are ignored. Raises RequestError."""
        params: SessionParams = _convert(values, cls, "session_params")
        return params

    @classmethod
    def parse_optional(cls, values: Any) -> SessionParams | None:
        """``parse``, where None stays None."""
        return None if values is None else cls.parse(values)


class OpenSession(msgspec.Struct, kw_only=True):
    """What open_session takes.

    capacity_of_str_len: the most tokens (prompts and outputs, shared ones counted once) and the most turns that the session may
    keep. session_id: None for one that is made up. streaming: turns only append, one at a time, and keep their KV. timeout:
    seconds without a turn under way after which it is closed; None: never.
    """

    capacity_of_str_len: Annotated[int, msgspec.Meta(ge=1)]
    session_id: str | None = None
    streaming: bool | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None

    @classmethod
    def parse(cls, values: Any) -> OpenSession:
        """From decoded JSON; unknown names are ignored. Raises RequestError that names the field."""
        given: OpenSession = _convert(values, cls)
        if given.timeout is not None and not math.isfinite(given.timeout):
            raise RequestError("timeout must be finite.", param="timeout")
        if given.session_id is not None:
            _check_id(given.session_id)
        return given


def _check_id(session_id: str) -> None:
    try:
        session_id.encode()
    except UnicodeEncodeError:
        raise RequestError("session_id is not valid Unicode.", param="session_id") from None
    if not 0 < len(session_id) <= MAX_ID_LEN:
        raise RequestError(f"session_id must have 1 to {MAX_ID_LEN} characters.", param="session_id")


def _convert(values: Any, kind: Any, param: str | None = None) -> Any:
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        name = re.search(r"`(?:\$\.)?(\w+)`$", str(error))
        raise RequestError(f"{param}: {error}" if param else str(error), param=param or (name and name[1])) from None


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session. Its prompt is the first history_len tokens of its parent's prompt + output, then new_ids."""

    rid: str
    session: Session
    parent: Turn | None
    history_len: int
    replace: bool = False
    new_ids: np.ndarray = field(default_factory=lambda: NO_IDS)
    output: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def prompt_len(self) -> int:
        return self.history_len + len(self.new_ids)

    @property
    def num_own(self) -> int:
        """Tokens that the session keeps for this turn."""
        return len(self.new_ids) + len(self.output)

    def history(self) -> np.ndarray:
        """Token ids int32 [history_len] that come before new_ids."""
        pieces: list[np.ndarray] = []
        end, turn = self.history_len, self.parent
        while end and turn is not None:
            if end > turn.history_len:
                own = np.concatenate([turn.new_ids, np.asarray(turn.output, np.int32)])
                pieces.append(own[: end - turn.history_len])
                end = turn.history_len
            turn = turn.parent
        return np.concatenate(pieces[::-1]) if pieces else NO_IDS


@dataclass(slots=True, eq=False)
class Session:
    """The turns by rid, in the order in which they began. num_tokens: what they keep. used: when it was last active."""

    id: str
    capacity: int
    streaming: bool
    timeout: float | None
    used: float
    turns: dict[str, Turn] = field(default_factory=dict)
    num_tokens: int = 0
    num_running: int = 0
    closing: bool = False

    def last(self) -> Turn | None:
        return next(reversed(self.turns.values()), None)

    def add(self, turn: Turn) -> None:
        self.turns[turn.rid] = turn

    def remove(self, turn: Turn) -> None:
        if self.turns.get(turn.rid) is turn:
            del self.turns[turn.rid]
            self.num_tokens -= turn.num_own

    def holds(self, turn: Turn) -> bool:
        return self.turns.get(turn.rid) is turn

    def below(self, root: Turn | None) -> list[Turn]:
        """The descendants of a turn, or all turns. Parents begin before their children."""
        if root is None:
            return list(self.turns.values())
        found = {root}
        for turn in self.turns.values():
            if turn.parent in found:
                found.add(turn)
        return [turn for turn in found if turn is not root]


class SessionController:
    """All sessions of an engine. ``now`` is any clock in seconds that does not go back.

    A turn goes through ``begin``, then ``commit`` or ``cancel``, then ``add_output`` any number of times, then ``finish``. Methods
    that can end sessions return those that ended.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._sessions: dict[str, Session] = {}
        self._running: dict[str, Turn] = {}  # turns that began and have not finished, by rid

    def __len__(self) -> int:
        return len(self._sessions)

    # --- sessions

    def open(self, session_id: str, request: OpenSession, now: float) -> None:
        """Raises RequestError for an id that exists, and with status 429 when there are too many sessions."""
        if session_id in self._sessions:
            raise RequestError(f"session_id: {session_id!r} exists already.", param="session_id")
        if len(self._sessions) >= self._max_sessions:
            raise RequestError(
                f"There are {self._max_sessions} sessions already (--max-sessions).",
                status_code=429,
                err_type="RateLimitError",
            )
        self._sessions[session_id] = Session(
            session_id, request.capacity_of_str_len, bool(request.streaming), request.timeout, used=now
        )

    def close(self, session_id: str) -> list[Session]:
        """Take no more turns; one that is busy ends with its last turn. Raises RequestError if there is no such session."""
        session = self._find(session_id, "session_id")
        session.closing = True
        return self._end_if_done(session)

    def reap(self, now: float) -> list[Session]:
        """End the sessions that were idle for longer than their time-out."""
        overdue = [
            session
            for session in self._sessions.values()
            if session.timeout is not None and not session.num_running and now - session.used > session.timeout
        ]
        for session in overdue:
            del self._sessions[session.id]
        return overdue

    def _find(self, session_id: str, param: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.closing:
            raise RequestError(f"Invalid request: session id {session_id} does not exist", param=param)
        return session

    def _end_if_done(self, session: Session) -> list[Session]:
        if not session.closing or session.num_running or session.id not in self._sessions:
            return []
        del self._sessions[session.id]
        return [session]

    # --- turns

    def begin(self, params: SessionParams, rid: str, now: float) -> Turn:
        """Begin a turn named ``rid``; its history is fixed, its own ids come with ``commit``.

        It continues the turn params.rid; without one, it starts anew (in a streaming session: continues the last turn). offset
        keeps that many tokens of the history, or drops that many when it is negative; 0 keeps all. drop_previous_output continues
        the earlier prompt as if it had not been answered. replace takes the descendants of the continued turn out of the session,
        or all turns when none is named. Raises RequestError.
        """
        session = self._find(params.id, "session_params")
        parent = self._parent(session, params)
        if rid in session.turns and not (params.replace and params.rid is None):
            raise RequestError(f"rid: {rid!r} names an earlier turn of the session.", param="rid")
        history_len = 0
        if parent is not None:
            length = parent.prompt_len + (0 if params.drop_previous_output else len(parent.output))
            history_len = len(range(length)[: params.offset or None])
        turn = Turn(rid, session, parent, history_len, replace=bool(params.replace))
        if not turn.replace:
            session.add(turn)
        self._running[rid] = turn
        session.num_running += 1
        session.used = now
        return turn

    def _parent(self, session: Session, params: SessionParams) -> Turn | None:
        if session.streaming:
            return self._last(session, params)
        if params.rid is None:
            return None
        parent = session.turns.get(params.rid)
        if parent is None:
            raise _invalid(f"rid {params.rid} does not exist in session {session.id}")
        if not parent.finished:
            raise _invalid(f"rid {params.rid} of session {session.id} has not finished")
        return parent

    def _last(self, session: Session, params: SessionParams) -> Turn | None:
        if params.replace or params.offset or params.drop_previous_output:
            raise _invalid(f"session {session.id} is streaming, which allows no replace, offset or drop_previous_output")
        if session.num_running:
            raise _invalid(f"session {session.id} is streaming and has a turn under way")
        last = session.last()
        if params.rid is not None and (last is None or last.rid != params.rid):
            raise _invalid(f"session {session.id} is streaming, and rid {params.rid} is not its last turn")
        return last

    def commit(self, turn: Turn, new_ids: np.ndarray) -> list[str]:
        """Give a turn its own prompt ids int32. Returns the rids of unfinished turns that it replaces: they are to be aborted.

        A turn that was itself replaced meanwhile is among those to be aborted. Raises RequestError if the session has not the
        room, and changes nothing then.
        """
        session = turn.session
        replaced = session.below(turn.parent) if turn.replace else []
        kept = session.num_tokens - sum(other.num_own for other in replaced) + len(new_ids)
        num_turns = len(session.turns) - len(replaced) + turn.replace
        if max(kept, num_turns) > session.capacity:
            raise RequestError(
                f"Invalid request: session {session.id} would keep {kept} tokens in {num_turns} turns, its capacity is"
                f" {session.capacity}",
                param="session_params",
            )
        for other in replaced:
            session.remove(other)
        if turn.replace and self._is_attached(turn.parent):
            session.add(turn)
        turn.new_ids = np.array(new_ids, np.int32)
        if not session.holds(turn):
            return [*_unfinished(replaced), turn.rid]
        session.num_tokens += len(new_ids)
        return _unfinished(replaced)

    def _is_attached(self, parent: Turn | None) -> bool:
        return parent is None or parent.session.holds(parent)

    def cancel(self, turn: Turn, now: float) -> list[Session]:
        """Undo ``begin`` for a request that was refused."""
        turn.session.remove(turn)
        return self._ended(turn, now)

    def add_output(self, rid: str, ids: Iterable[int]) -> None:
        """More output of a turn; other rids are ignored."""
        turn = self._running.get(rid)
        if turn is not None:
            before = len(turn.output)
            turn.output.extend(ids)
            if turn.session.holds(turn):
                turn.session.num_tokens += len(turn.output) - before

    def finish(self, rid: str, now: float, *, failed: bool, aborted: bool) -> list[Session]:
        """A turn ended; other rids are ignored.

        One that failed leaves the session, so that it can be sent again. One that the client aborted stays with what it produced,
        except in a streaming session, which goes on after the turn before it.
        """
        turn = self._running.get(rid)
        if turn is None:
            return []
        turn.finished = True
        if failed or (aborted and turn.session.streaming):
            turn.session.remove(turn)
        return self._ended(turn, now)

    def _ended(self, turn: Turn, now: float) -> list[Session]:
        if self._running.pop(turn.rid, None) is None:
            return []
        turn.session.num_running -= 1
        turn.session.used = now
        return self._end_if_done(turn.session)


def _unfinished(turns: list[Turn]) -> list[str]:
    return [turn.rid for turn in turns if not turn.finished]


def _invalid(what: str) -> RequestError:
    return RequestError(f"Invalid request: {what}", param="session_params")
