"""Constraint: where one request stands in its grammar and in its thinking; GrammarStore: the grammars that a scheduler has loaded.

A constraint fails closed: a request whose grammar cannot go on is aborted, never continued without it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..errors import RequestError
from ..io_struct import ControlReply, LoadGrammarReq
from .grammar import CompiledGrammar, GrammarBackend, Matcher, Vocabulary, create_backend
from .jump_forward import JumpForward
from .thinking import Phase, Thinking

logger = logging.getLogger(__name__)

ALL = np.int32(-1)  # a word of a mask in which everything is allowed


class Constraint:
    """Where one request stands: in its thinking part, if it has one, and then in its grammar, if it has one.

    The grammar begins behind the thinking part; inside it everything but the end of the text is allowed, or nothing but the end
    mark when the budget is used up. Where the output may open a thinking part itself, its start mark is allowed besides what the
    grammar allows.
    """

    def __init__(
        self,
        matcher: Matcher | None,
        stop_ids: tuple[int, ...],
        thinking: Thinking | None = None,
        *,
        jumper: JumpForward | None = None,
    ) -> None:
        """jumper: finds what the grammar forces; None: every token is sampled."""
        self._matcher = matcher
        self._jumper = jumper
        self.stop_ids = stop_ids
        self.thinking = thinking
        self._behind = matcher.fork() if matcher and thinking and thinking.phase is Phase.BEFORE else matcher
        self._rejected = False  # the grammar does not allow what may still become a start mark
        self.failed = False

    @property
    def has_grammar(self) -> bool:
        return self._matcher is not None

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self._matcher is not None and self._phase is Phase.OVER and not self.failed and self._matcher.is_terminated

    @property
    def _phase(self) -> Phase:
        return self.thinking.phase if self.thinking else Phase.OVER

    def accept(self, token_id: int) -> None:
        """Take in what was sampled. A token that the grammar forbids makes the constraint ``failed``."""
        before = self._phase
        if self.thinking and before is not Phase.OVER:
            self.thinking.push(token_id)
        if self._matcher is None or before is Phase.INSIDE:
            return
        if self._phase is Phase.INSIDE:
            self._matcher, self._rejected = self._behind, False
            return
        self._rejected = self._rejected or not self._matcher.accept(token_id)
        self.failed = self._rejected and self._phase is Phase.OVER

    def fill(self, row: np.ndarray, *, may_stop: bool) -> None:
        """Write what may come next to row, int32 [words]; may_stop False: no end of the text, unless nothing else is left.

        Nothing is allowed after a failure. may_stop counts with a grammar only.
        """
        row[:] = 0
        if self.failed:
            return
        if self.thinking and self.thinking.forced is not None:
            allow(row, self.thinking.forced)
            return
        inside = self._phase is Phase.INSIDE
        if self._matcher is None or inside:
            row[:] = ALL
        elif not self._rejected:
            self._matcher.fill_mask(row)
        if self._matcher is not None and (inside or not may_stop):
            self._forbid_stops(row, always=inside)
        if self.thinking and self.thinking.next_start is not None:
            allow(row, self.thinking.next_start)

    def jump(self, context: list[int]) -> list[int]:
        """The tokens that must come next, behind those of ``context``; empty if there are several ways or too few tokens."""
        if self._matcher is None or self._jumper is None or self.failed or self._phase is not Phase.OVER:
            return []
        return self._jumper.tokens(self._matcher, context)

    def _forbid_stops(self, row: np.ndarray, *, always: bool) -> None:
        before = [(token_id // 32, row[token_id // 32]) for token_id in self.stop_ids]
        for token_id in self.stop_ids:
            row[token_id // 32] &= ~_bit(token_id)
        if not always and not row.any():
            for word, bits in reversed(before):
                row[word] = bits


def allow(row: np.ndarray, token_id: int) -> None:
    """Set the bit of a token in a row of a mask."""
    row[token_id // 32] |= _bit(token_id)


@functools.cache
def _bit(token_id: int) -> np.int32:
    word: np.int32 = np.uint32(1 << (token_id % 32)).view(np.int32)
    return word


class GrammarStore:
    """The grammars that were sent to this scheduler, by key. They are loaded on a thread, by native code that leaves the GIL."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        reply: Callable[[ControlReply], None],
        jumper: Callable[[], JumpForward] | None = None,
    ) -> None:
        """vocabulary and jumper are called when the first grammar comes, on the loading thread; reply is called on any thread.

        jumper None: no jump-forward.
        """
        self._make_jumper = jumper
        self._jumper: JumpForward | None = None
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
            if self._jumper is None and self._make_jumper is not None:
                self._jumper = self._make_jumper()
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

    def constraint(self, key: str, thinking: Thinking | None = None) -> Constraint:
        """A constraint at its beginning. Waits for a grammar that is being loaded. Raises RequestError if there is none."""
        loading = self._loading.get(key)
        if loading is None:
            raise RequestError("The request's grammar is not there.", status_code=500, err_type="InternalServerError")
        return Constraint(loading.result().matcher(), self.vocabulary().stop_ids, thinking, jumper=self._jumper)

    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return self._vocabulary
