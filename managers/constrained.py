"""The masks of steps whose rows follow a grammar.

Under the overlap loop a step is launched before the tokens of the step before are known. So its mask is late: it is filled when
those tokens have been absorbed, while the step computes, and the step waits for it only when it samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from ..layers.late_mask import LateMask
from .constraint import ALL, Constraint, GrammarStore, allow
from .io_struct import FinishReason
from .jump_forward import MIN_TOKENS, NUM_CONTEXT
from .live_table import LiveTable
from .req import Req
from .schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)


def refused(reason: str) -> FinishReason:
    """Why a constrained request is aborted."""
    return FinishReason(kind="abort", message=reason, status_code=500, err_type="InternalServerError")


DEAD_END = refused("No token is left that the grammar allows.")
VIOLATED = refused("A token was sampled that the grammar does not allow.")


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
        dead = []
        try:
            for index in np.flatnonzero(table.epochs[rows] == epochs):  # of the others, nobody wants the result
                req = table.req(int(rows[index]))
                if not self._fill_row(req, bits[index]):
                    dead.append(req)
        finally:
            mask.fill(bits)
        for req in dead:
            self._abort(req.rid, DEAD_END)

    def _fill_row(self, req: Req, row: np.ndarray) -> bool:
        """False: nothing is allowed."""
        if req.constraint is None:
            return True
        if (jump := self._jump(req, req.constraint)) is not None:
            row[:] = 0
            allow(row, jump)
            return True
        may_stop = self._table.known_lens[req.row] >= self._table.min_lens[req.row]
        try:
            req.constraint.fill(row, may_stop=bool(may_stop))
        except (RuntimeError, ValueError):
            logger.exception("the grammar of request %s failed", req.rid)
            row[:] = 0
        row[-1] &= self._tail
        return bool(row.any())

    def _jump(self, req: Req, constraint: Constraint) -> int | None:
        """If the grammar leaves one path only, note its tokens: the first is what the step will yield, the others are appended with
        it (``append_jump``), and the next step of the row computes all of them. Returns the first.

        Not for rows whose every token needs its logits: log-probabilities and controls are theirs.
        """
        table, row = self._table, req.row
        if req.logprobs is not None or req.has_controls:
            return None
        begin = int(table.known_lens[row])
        try:
            ids = constraint.jump(table.tokens[row, max(begin - NUM_CONTEXT, 0) : begin].tolist())
        except (RuntimeError, ValueError):
            logger.exception("the grammar of request %s failed", req.rid)
            return None
        ids = ids[: int(table.limits[row]) - begin - 1]
        if len(ids) < MIN_TOKENS:
            return None
        table.tokens[row, begin : begin + len(ids)] = ids
        table.jump_ends[row] = begin + len(ids)
        req.jump = ids[1:]
        self._jumps.append((req.rid, ids))
        return ids[0]


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
