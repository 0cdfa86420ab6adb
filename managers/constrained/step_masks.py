"""The masks of steps whose rows follow a grammar.

Under the overlap loop a step is launched before the tokens of the step before are known. So its mask is late: it is filled when
those tokens have been absorbed, while the step computes, and the step waits for it only when it samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...layers.late_mask import LateMask
from ..io_struct import FinishReason
from ..live_table import LiveTable
from ..req import Req
from ..schedule_batch import ScheduleBatch
from .constraint import ALL, GrammarStore, allow
from .jump_forward import MIN_TOKENS, NUM_CONTEXT
from .mask_filler import MaskFiller

logger = logging.getLogger(__name__)

DEFAULT_LIMIT = 0.5  # seconds that the look into one grammar may take; usual are 50 microseconds


def refused(reason: str) -> FinishReason:
    """Why a constrained request is aborted."""
    return FinishReason(kind="abort", message=reason, status_code=500, err_type="InternalServerError")


DEAD_END = FinishReason(  # the grammar is the client's: one like "root ::= root" has no text
    kind="abort", message="No token is left that the grammar allows.", status_code=400, err_type="BadRequestError"
)
TOO_SLOW = FinishReason(
    kind="abort",
    message="The grammar takes too long: what it allows next was not found within --grammar-mask-timeout.",
    status_code=400,
    err_type="BadRequestError",
)
BROKEN = refused("The grammar failed.")
VIOLATED = refused("A token was sampled that the grammar does not allow.")


class Look(NamedTuple):
    """What a grammar says of the next token: the tokens that it forces, or none and a mask, int32 [words]; no mask: it failed."""

    forced: list[int]
    mask: np.ndarray | None


def constrained_reason(req: Req, token_id: int) -> FinishReason | None:
    """Take a sampled token into the request's constraint; whether that ends the request, and why."""
    constraint = req.constraint
    if constraint is None:
        return None
    constraint.accept(token_id)
    if constraint.failed:
        return VIOLATED
    if not constraint.is_complete:
        return None
    # matched only for a token that is no part of the text
    return FinishReason(kind="stop", matched=token_id if token_id in constraint.stop_ids else None)


class StepMasks:
    """Fills the masks of launched steps. abort(rid, reason) ends a request whose grammar allows nothing more.

    late: the runner computes on another thread, so that a mask may be filled after the launch.
    """

    def __init__(self, table: LiveTable, abort: Callable[[str, FinishReason], bool], *, late: bool) -> None:
        self._table = table
        self._abort = abort
        self._late = late
        self._width = (len(table.eos_mask) + 31) // 32
        spare = self._width * 32 - len(table.eos_mask)
        self._tail = np.uint32(0xFFFFFFFF >> spare).view(np.int32)  # the bits of the last word that stand for tokens
        self._pending: ScheduleBatch | None = None
        self.grammars: GrammarStore | None = None  # whoever takes messages in puts it here
        self.filler = MaskFiller(DEFAULT_LIMIT)
        self._jumps: list[tuple[str, list[int]]] = []

    def must_wait(self, rows: np.ndarray) -> bool:
        """Whether the mask of a step of these rows would have to be filled before a token that it depends on is known."""
        table = self._table
        return not self._late and bool((table.constrained[rows] & (table.known_lens[rows] < table.launched_lens[rows])).any())

    def launching(self, batch: ScheduleBatch) -> None:
        """A step is about to be launched: fill its mask now if it depends on nothing that is unknown, else when ``absorbed``."""
        mask = batch.step.sampling.allowed
        if mask is None:
            return
        rows = self._rows(batch, mask)
        if (self._table.known_lens[rows] + 1 == self._table.launched_lens[rows]).all():
            self._fill(batch, mask)
        else:
            self._pending = batch

    def absorbed(self) -> None:
        """The step before the newest launched one was absorbed, or failed: all that the newest one's mask depends on is known."""
        batch, self._pending = self._pending, None
        if batch is not None and batch.step.sampling.allowed is not None:
            self._fill(batch, batch.step.sampling.allowed)

    def take_jumps(self) -> list[tuple[str, list[int]]]:
        """The jumps decided since the last call: request and tokens."""
        jumps, self._jumps = self._jumps, []
        return jumps

    @staticmethod
    def _rows(batch: ScheduleBatch, mask: LateMask) -> np.ndarray:
        rows: np.ndarray = batch.step.rows[batch.step.sample_index[mask.rows]]
        return rows

    def _fill(self, batch: ScheduleBatch, mask: LateMask) -> None:
        table = self._table
        bits = np.full((len(mask.rows), self._width), ALL)
        rows = self._rows(batch, mask)
        epochs = batch.epochs[batch.step.sample_index[mask.rows]]
        try:
            alive = np.flatnonzero(table.epochs[rows] == epochs)  # of the others, nobody wants the result
            bound = [(index, req) for index in alive if (req := table.req(int(rows[index]))).constraint is not None]
            found = self.filler.run([self._look(req) for _, req in bound])
            dead = [(req, self._take(req, look, bits[index])) for (index, req), look in zip(bound, found, strict=True)]
        finally:
            mask.fill(bits)
        for req, reason in dead:
            if reason is not None:
                self._abort(req.rid, reason)

    def _look(self, req: Req) -> Callable[[], Look]:
        """A look into the grammar of a request: what it forces, else its mask. Touches nothing but its constraint."""
        table, row, constraint, width = self._table, req.row, req.constraint, self._width
        begin = int(table.known_lens[row])
        may_stop = begin >= table.min_lens[row]
        jumps = req.logprobs is None and not req.has_controls
        room = int(table.limits[row]) - begin - 1 if jumps else 0
        context = table.tokens[row, max(begin - NUM_CONTEXT, 0) : begin].tolist() if room >= MIN_TOKENS else []

        def look() -> Look:
            mask = np.zeros(width, np.int32)
            try:
                forced = constraint.jump(context)[:room] if constraint and room >= MIN_TOKENS else []
                if constraint and len(forced) < MIN_TOKENS:
                    constraint.fill(mask, may_stop=bool(may_stop))
                    return Look([], mask)
            except (RuntimeError, ValueError):
                logger.exception("the grammar of a request failed")
                return Look([], None)
            return Look(forced, mask)

        return look

    def _take(self, req: Req, look: Look | None, bits: np.ndarray) -> FinishReason | None:
        """Write what was found to the request's row of the mask; why it ends, if nothing is allowed.

        Where the grammar leaves one path only, the first of its tokens is what the step will yield. The others are appended with it
        (``append_jump``), and the next step of the row computes all of them. Rows whose every token needs its logits do not jump:
        log-probabilities and controls are theirs.
        """
        if look is None:
            bits[:] = 0
            return TOO_SLOW
        if look.mask is None:
            bits[:] = 0
            return BROKEN
        if look.forced:
            table, row = self._table, req.row
            begin, end = int(table.known_lens[row]), int(table.known_lens[row]) + len(look.forced)
            table.tokens[row, begin:end] = look.forced
            table.jump_ends[row] = end
            req.jump = look.forced[1:]
            self._jumps.append((req.rid, look.forced))
            allow(look.mask, look.forced[0])
        bits[:] = look.mask
        bits[-1] &= self._tail
        return None if bits.any() else DEAD_END


def append_jump(table: LiveTable, req: Req) -> FinishReason | None:
    """The first token of a jump was absorbed: take the others in, up to one that ends the request, and say why it ends."""
    tail, req.jump = req.jump, []
    for token_id in tail:
        table.tokens[req.row, table.known_lens[req.row]] = token_id
        table.known_lens[req.row] += 1
        reason = constrained_reason(req, token_id) or (req.stop_reason(token_id) if table.own_stops[req.row] else None)
        if reason is not None:
            return reason
    return None
