"""Constraint: where one request stands in its grammar; GrammarStore: the grammars that a scheduler has loaded.

A constraint fails closed: a request whose grammar cannot go on is aborted, never continued without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .errors import RequestError
from .grammar import CompiledGrammar, GrammarBackend, Matcher, Vocabulary, create_backend
from .io_struct import ControlReply, LoadGrammarReq

logger = logging.getLogger(__name__)

ALL = np.int32(-1)  # a word of a mask in which everything is allowed


class Constraint:
    """Where one request stands. With ``think_end`` the grammar begins after the first place where the output holds these tokens;
    until then everything but the end of the text is allowed."""

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary, think_end: tuple[int, ...] = ()) -> None:
        self._matcher = matcher
        self.stop_ids = vocabulary.stop_ids
        self._think_end = think_end
        self._recent: tuple[int, ...] = ()
        self.thinking = bool(think_end)
        self.failed = False

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return not self.thinking and not self.failed and self._matcher.is_terminated

    def accept(self, token_id: int) -> None:
        """Take in what was sampled. A token that the grammar forbids makes the constraint ``failed``."""
        if self.thinking:
            self._recent = (*self._recent, token_id)[-len(self._think_end) :]
            self.thinking = self._recent != self._think_end
        elif not self._matcher.accept(token_id):
            self.failed = True

    def fill(self, row: np.ndarray, *, may_stop: bool) -> None:
        """Write what may come next to row, int32 [words]; may_stop False: no end of the text, unless nothing else is left.

        Nothing is allowed after a failure.
        """
        if self.failed:
            row[:] = 0
            return
        if self.thinking:
            row[:] = ALL
        else:
            self._matcher.fill_mask(row)
        if self.thinking or not may_stop:
            self._forbid_stops(row)

    def _forbid_stops(self, row: np.ndarray) -> None:
        without = row.copy()
        for token_id in self.stop_ids:
            without[token_id // 32] &= ~np.int32(np.uint32(1 << (token_id % 32)).view(np.int32))
        if self.thinking or without.any():
            row[:] = without


class GrammarStore:
    """The grammars that were sent to this scheduler, by key. They are loaded on a thread, by native code that leaves the GIL."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], reply: Callable[[ControlReply], None]) -> None:
        """vocabulary is called when the first grammar comes; reply is called on any thread."""
        self._make_vocabulary = vocabulary
        self._reply = reply
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, GrammarBackend] = {}
        self._loading: dict[str, Future[CompiledGrammar]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def load(self, message: LoadGrammarReq) -> None:
        """Load a grammar; replies when that is done."""
        key, backend = message.key, message.backend

        def work() -> CompiledGrammar:
            if backend not in self._backends:
                self._backends[backend] = create_backend(backend, self.vocabulary())
            return self._backends[backend].load(message.data)

        def done(future: Future[CompiledGrammar]) -> None:
            error = future.exception()
            if error is not None:
                logger.error("a grammar could not be loaded", exc_info=error)
            why = "" if error is None else f"{type(error).__name__}: {error}"
            self._reply(ControlReply(call_id=message.call_id, success=error is None, message=why))

        if key not in self._loading:
            self._loading[key] = self._pool.submit(work)
        self._loading[key].add_done_callback(done)

    def drop(self, key: str) -> None:
        """Forget a grammar; requests that follow it keep it."""
        self._loading.pop(key, None)

    def constraint(self, key: str, think_end: tuple[int, ...] = ()) -> Constraint:
        """A constraint at its beginning. Waits for a grammar that is being loaded. Raises RequestError if there is none."""
        loading = self._loading.get(key)
        if loading is None:
            raise RequestError("The request's grammar is not there.", status_code=500, err_type="InternalServerError")
        return Constraint(loading.result().matcher(), self.vocabulary(), think_end)

    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return self._vocabulary
