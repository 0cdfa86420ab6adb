"""ScheduleBatch: the rows of one step, and the arrays that the runner is told, built from the LiveTable."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..layers.late_mask import LateMask
from ..model_executor.step import ForwardMode, RowControls, SamplingInput, StepInput
from .hidden_states import ask_hidden
from .live_table import LiveTable
from .logprobs.plan import ask_prompts, ask_sampled
from .req import Req


@dataclass(slots=True)
class ScheduleBatch:
    """One step. The first num_prefill rows compute prompts or chunks of them, the others decode.

    epochs: int64 [B], of the rows at launch; a row whose epoch has changed since has a new owner or none.
    """

    step: StepInput
    epochs: np.ndarray
    num_prefill: int

    @property
    def rows(self) -> np.ndarray:
        return self.step.rows


def build_decode(table: LiveTable, rows: np.ndarray, slots: np.ndarray) -> ScheduleBatch:
    """One token for each of ``rows``: launch the newest token of each, whose KV goes to slots [B]."""
    seq_lens, input_ids = _advance(table, rows, slots)
    step = StepInput(
        mode=ForwardMode.DECODE,
        rows=rows,
        seq_lens=seq_lens,
        extend_lens=np.ones(len(rows), np.int32),
        input_ids=input_ids,
        out_cache_loc=slots,
        sample_index=np.arange(len(rows), dtype=np.int32),
        sampling=_sampling(table, rows, seq_lens),
        sampled_logprobs=ask_sampled(table, rows),
    )
    ask_hidden(table, step)
    return ScheduleBatch(step=step, epochs=table.epochs[rows], num_prefill=0)


def build_extend(table: LiveTable, rows: np.ndarray, extend_lens: np.ndarray, slots: np.ndarray) -> ScheduleBatch:
    """The next extend_lens [B] known tokens of each of ``rows``; their KV goes to slots [sum(extend_lens)], row by row.

    A row samples when its last known token is among them and it may have output at all.
    """
    prefix_lens = table.kv_lens[rows]
    seq_lens = prefix_lens + extend_lens
    bounds = np.cumsum(extend_lens)[:-1]
    for row, start, end, own in zip(rows, prefix_lens, seq_lens, np.split(slots, bounds), strict=True):
        table.pool.write(int(row), int(start), own)
        table.kv_lens[row] = end
    ids = [table.tokens[row, start:end] for row, start, end in zip(rows, prefix_lens, seq_lens, strict=True)]
    samples = np.flatnonzero((seq_lens == table.known_lens[rows]) & (seq_lens < table.limits[rows])).astype(np.int32)
    sampling_rows = rows[samples]
    table.launched_lens[sampling_rows] += 1
    step = StepInput(
        mode=ForwardMode.EXTEND,
        rows=rows,
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        input_ids=np.concatenate(ids).astype(np.int64),
        out_cache_loc=slots,
        sample_index=samples,
        sampling=_sampling(table, sampling_rows, seq_lens[samples]),
        controls=_controls(table, sampling_rows),
        sampled_logprobs=ask_sampled(table, sampling_rows),
    )
    step.prompt_logprobs = ask_prompts(table, step)
    ask_hidden(table, step)
    return ScheduleBatch(step=step, epochs=table.epochs[rows], num_prefill=len(rows))


def build_next(table: LiveTable, rows: np.ndarray, slots: np.ndarray) -> ScheduleBatch:
    """The next step of running rows: one token each, or all tokens of a jump. slots: of table.next_ends(rows), row by row."""
    if not table.jump_ends[rows].any():
        return build_decode(table, rows, slots)
    prefix_lens, seq_lens = table.kv_lens[rows], table.next_ends(rows)
    extend_lens = seq_lens - prefix_lens
    ids = []
    for row, start, end, own in zip(
        rows.tolist(), prefix_lens.tolist(), seq_lens.tolist(), np.split(slots, np.cumsum(extend_lens)[:-1]), strict=True
    ):
        table.pool.write(row, start, own)
        known = table.jump_ends[row] or table.known_lens[row] >= end
        ids.append(table.tokens[row, start:end].astype(np.int64) if known else np.array([-row]))
    table.kv_lens[rows] = seq_lens
    table.launched_lens[rows] = seq_lens + 1
    table.jump_ends[rows] = 0
    step = StepInput(
        mode=ForwardMode.EXTEND,
        rows=rows,
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        input_ids=np.concatenate(ids),
        out_cache_loc=slots,
        sample_index=np.arange(len(rows), dtype=np.int32),
        sampling=_sampling(table, rows, seq_lens),
        sampled_logprobs=ask_sampled(table, rows),
    )
    ask_hidden(table, step)
    return ScheduleBatch(step=step, epochs=table.epochs[rows], num_prefill=0)


def mix(table: LiveTable, prefill: ScheduleBatch, running: ScheduleBatch) -> ScheduleBatch:
    """Both as one step. No row is in both."""
    first, second = prefill.step, running.step
    samples = np.concatenate([first.sample_index, len(first.rows) + second.sample_index])
    rows, seq_lens = np.concatenate([first.rows, second.rows]), np.concatenate([first.seq_lens, second.seq_lens])
    embeds = [replace(span, start=len(first.input_ids) + span.start) for span in second.embeds]
    hidden = [replace(span, index=len(first.rows) + span.index, start=len(first.input_ids) + span.start) for span in second.hidden]
    step = StepInput(
        mode=ForwardMode.MIXED,
        rows=rows,
        seq_lens=seq_lens,
        extend_lens=np.concatenate([first.extend_lens, second.extend_lens]),
        input_ids=np.concatenate([first.input_ids, second.input_ids]),
        out_cache_loc=np.concatenate([first.out_cache_loc, second.out_cache_loc]),
        sample_index=samples,
        sampling=_sampling(table, rows[samples], seq_lens[samples]),
        controls=first.controls,
        prompt_logprobs=first.prompt_logprobs,
        sampled_logprobs=ask_sampled(table, rows[samples]),
        embeds=first.embeds + embeds,
        hidden=first.hidden + hidden,
    )
    return ScheduleBatch(step=step, epochs=table.epochs[rows], num_prefill=prefill.num_prefill)


def _advance(table: LiveTable, rows: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Note one more launched token for each of ``rows``; their lengths with it in the KV, and its id or placeholder."""
    seq_lens = table.launched_lens[rows]
    newest = table.tokens[rows, seq_lens - 1].astype(np.int64)
    input_ids = np.where(table.known_lens[rows] == seq_lens, newest, -rows.astype(np.int64))
    table.pool.table[rows, seq_lens - 1] = slots
    table.kv_lens[rows] = seq_lens
    table.launched_lens[rows] = seq_lens + 1
    return seq_lens, input_ids


def _sampling(table: LiveTable, rows: np.ndarray, positions: np.ndarray) -> SamplingInput:
    """Parameters of rows whose next token is at ``positions``; those below their min_new_tokens may not stop.

    Of rows that follow a grammar, that is for their mask to say: an output that the grammar calls complete must be able to end.
    """
    sampling = table.sampling.take(rows, positions)
    constrained = table.constrained[rows]
    if constrained.any():
        sampling.allowed = LateMask(np.flatnonzero(constrained))
    young = np.flatnonzero((positions < table.min_lens[rows]) & ~table.grammatical[rows])
    if len(young):
        bans = [(index, _stop_ids(table, int(rows[index]))) for index in young]
        sampling.banned_rows = np.concatenate([np.full(len(ids), index, np.int32) for index, ids in bans])
        sampling.banned_ids = np.concatenate([ids for _, ids in bans])
    return sampling


def _controls(table: LiveTable, rows: np.ndarray) -> dict[int, RowControls | None]:
    """What the runner must know of rows that sample for the first time since they were seated."""
    controls: dict[int, RowControls | None] = {}
    for row in rows.tolist():
        req = table.req(row)
        if req.has_controls:
            controls[row] = _row_controls(req, table.tokens[row, : table.known_lens[row]].copy())
        elif table.controlled[row]:
            controls[row] = None
        table.controlled[row] = req.has_controls
    return controls


def _row_controls(req: Req, tokens: np.ndarray) -> RowControls:
    params = req.params
    bias, allowed = params.logit_bias, params.allowed_token_ids
    return RowControls(
        prompt_ids=tokens[: req.num_prompt if req.embeds is None else 0],
        output_ids=tokens[req.num_prompt :],
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=np.array([int(key) for key in bias], np.int32) if bias else None,
        bias_values=np.array(list(bias.values()), np.float32) if bias else None,
        allowed_ids=np.unique(np.array(allowed, np.int32)) if allowed is not None else None,
        bad_words=req.bad_word_ids,
        processor=req.logit_processor,
        custom_params=params.custom_params,
    )


def _stop_ids(table: LiveTable, row: int) -> np.ndarray:
    own = np.fromiter(table.req(row).stop_ids, np.int32)
    return own if table.ignore_eos[row] else np.union1d(own, np.flatnonzero(table.eos_mask)).astype(np.int32)
