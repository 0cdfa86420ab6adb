"""ResultProcessor: takes the sampled tokens of a step into the live table, finds who is finished, and sends the output on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from ..model_executor.step import NO_CHOICE, StepOutput
from .constrained.step_masks import append_jump, constrained_reason
from .hidden_states import take_hidden
from .io_struct import FinishReason
from .live_table import LiveTable
from .logprobs.plan import take_logprobs
from .output_stream import OutputStream
from .req import Req
from .schedule_batch import ScheduleBatch

NAN_REASON = FinishReason(
    kind="abort", message="The model returned NaN or infinite logits.", status_code=500, err_type="InternalServerError"
)


NO_CHOICE_REASON = FinishReason(
    kind="abort",
    message="No token may come next: logit_bias, allowed_token_ids, bad_words and min_new_tokens exclude all.",
    status_code=400,
    err_type="BadRequestError",
)


class Finish(Protocol):
    """Releases a request that ended; share=False when its KV may be broken."""

    def __call__(self, req: Req, *, share: bool = True) -> None: ...


class ResultProcessor:
    """finish(req) releases a request that ended; keep(req) shares the prompt KV of one that goes on; pin(req), called before
    finish, says how much of its prompt is pinned, None if it did not ask for that."""

    def __init__(
        self,
        table: LiveTable,
        outputs: OutputStream,
        finish: Finish,
        keep: Callable[[Req], None],
        pin: Callable[[Req], int | None] = lambda req: None,
    ) -> None:
        self._table = table
        self._outputs = outputs
        self._finish = finish
        self._keep = keep
        self._pin = pin

    def absorb(self, batch: ScheduleBatch, output: StepOutput) -> None:
        """Take a step's results in. Rows that changed hands since the launch are skipped."""
        table, step = self._table, batch.step
        alive = table.epochs[step.rows] == batch.epochs
        table.confirmed_lens[step.rows[alive]] = step.seq_lens[alive]
        take_logprobs(table, step, output, alive)
        take_hidden(table, step, output, alive)
        sampled = alive[step.sample_index]
        rows = step.rows[step.sample_index[sampled]]
        finished = self._append(rows, output.next_ids[sampled])
        prompts = step.rows[: batch.num_prefill]
        if len(prompts):
            self._share_prompts(prompts[alive[: batch.num_prefill]], finished)
        self._pin_prompts(finished)
        if finished:
            rows = np.union1d(rows, np.fromiter(finished, np.int32))
        self._outputs.emit(rows, finished)
        for row in finished:
            self._finish(table.req(row), share=finished[row] is not NAN_REASON)

    def _pin_prompts(self, finished: dict[int, FinishReason]) -> None:
        for row, reason in finished.items():
            num_pinned = self._pin(self._table.req(row)) if reason.kind != "abort" else None
            if num_pinned is not None:
                finished[row] = msgspec.structs.replace(reason, pinned_tokens=num_pinned)

    def fail(self, batch: ScheduleBatch, reason: FinishReason) -> None:
        """End every request of a step that raised; what the step computed is not kept."""
        rows = batch.rows[self._table.epochs[batch.rows] == batch.epochs]
        self._outputs.emit(rows, dict.fromkeys(rows.tolist(), reason))
        for row in rows.tolist():
            self._finish(self._table.req(row), share=False)

    def _append(self, rows: np.ndarray, ids: np.ndarray) -> dict[int, FinishReason]:
        """Add a token to each of ``rows``; returns those that ended, with the reason."""
        table = self._table
        bad = ids < 0
        finished = dict.fromkeys(rows[bad].tolist(), NAN_REASON) | dict.fromkeys(rows[ids == NO_CHOICE].tolist(), NO_CHOICE_REASON)
        if finished:
            rows, ids = rows[~bad], ids[~bad]
        lens = table.known_lens[rows]
        table.tokens[rows, lens] = ids
        table.known_lens[rows] = lens + 1
        eos = table.eos_mask[ids] & ~table.ignore_eos[rows]
        length = lens + 1 >= table.limits[rows]
        for index in np.flatnonzero(eos | length | table.own_stops[rows] | table.constrained[rows]).tolist():
            row, token_id = int(rows[index]), int(ids[index])
            reason = constrained_reason(table.req(row), token_id) if table.constrained[row] else None
            if reason is None and table.own_stops[row]:
                reason = table.req(row).stop_reason(token_id)
            if reason is None and table.constrained[row] and table.req(row).jump:
                reason = append_jump(table, table.req(row))
            if reason is None and eos[index]:
                reason = FinishReason(kind="stop", matched=token_id)
            if reason is None and length[index]:
                reason = FinishReason(kind="length", length=int(lens[index] + 1 - table.prompt_lens[row]))
            if reason is not None:
                finished[row] = reason
        return finished

    def _share_prompts(self, rows: np.ndarray, finished: dict[int, FinishReason]) -> None:
        """Prompts, or chunks of them, were computed: end those that want no output, share the KV of those that go on."""
        table = self._table
        for row in rows.tolist():
            if row not in finished and table.confirmed_lens[row] >= table.limits[row]:
                finished[row] = FinishReason(kind="length", length=0)
            elif row not in finished:
                self._keep(table.req(row))
