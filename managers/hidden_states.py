"""Embeddings that are prompts and hidden states that are told: what a step is asked for, and who gets what it yields."""

from __future__ import annotations

import numpy as np

from ..layers.hidden_input import EmbedSpan, HiddenSpan, split_hidden
from ..model_executor.step import StepInput, StepOutput
from .live_table import LiveTable


def ask_hidden(table: LiveTable, step: StepInput) -> None:
    """Add to a step what its rows' prompts are made of, and which states they want."""
    wanted = table.hidden[step.rows] | table.embeds[step.rows]
    if not wanted.any():
        return
    starts = np.cumsum(step.extend_lens) - step.extend_lens
    for index in np.flatnonzero(wanted).tolist():
        req = table.req(int(step.rows[index]))
        start, end = int(starts[index]), int(step.seq_lens[index])
        begin = end - int(step.extend_lens[index])
        if req.embeds is not None and begin < req.num_prompt:
            step.embeds.append(EmbedSpan(start, req.embeds[begin:end]))
        if req.hidden is not None and req.hidden.asked < end:
            first = end - 1 if req.hidden.newest else max(begin, req.hidden.asked)
            req.hidden.asked = end
            step.hidden.append(HiddenSpan(index, start + first - begin, end - first))


def take_hidden(table: LiveTable, step: StepInput, output: StepOutput, alive: np.ndarray) -> None:
    """Keep what a step brought for the requests that are still on their rows (alive [B])."""
    if not step.hidden:
        return
    known = output.hidden is not None  # a replay knows none
    values = split_hidden(step.hidden, output.hidden) if output.hidden is not None else [np.empty(0)] * len(step.hidden)
    for span, part in zip(step.hidden, values, strict=True):
        own = table.req(int(step.rows[span.index])).hidden if alive[span.index] else None
        if own is not None:
            own.take(part if known else None, int(step.seq_lens[span.index]))
