"""Log-probabilities in the scheduler: what a step is asked for, and who gets what it yields."""

from __future__ import annotations

import numpy as np

from ...layers.logprob_input import LogprobRequest, unpack_logprobs
from ...model_executor.step import StepInput, StepOutput
from ..live_table import LiveTable
from .req_logprobs import ReqLogprobs


def ask_prompts(table: LiveTable, step: StepInput) -> list[LogprobRequest]:
    """What the prompts or chunks in a prefill step must yield."""
    requests: list[LogprobRequest] = []
    if not table.logprobs[step.rows].any():
        return requests
    starts = np.cumsum(step.extend_lens) - step.extend_lens
    for index in np.flatnonzero(table.logprobs[step.rows]).tolist():
        row, end = int(step.rows[index]), int(step.seq_lens[index])
        own = _state(table, row)
        begin = end - int(step.extend_lens[index])
        # the logits of a position tell of the token after it
        first, last = max(own.next_input, begin + 1), min(end + 1, own.num_input)
        if first < last:
            targets = np.zeros(last - first, np.int64)  # 0 stands for the token after the prompt, which nobody knows
            targets[: own.num_prompt - first] = table.tokens[row, first : min(last, own.num_prompt)]
            requests.append(own.request(index, start=int(starts[index]) + first - 1 - begin, targets=targets))
    return requests


def ask_sampled(table: LiveTable, rows: np.ndarray) -> list[LogprobRequest]:
    """What the rows that sample must yield."""
    wanted = table.logprobs[rows]
    return [_state(table, int(rows[index])).request(index) for index in np.flatnonzero(wanted).tolist()] if wanted.any() else []


def take_logprobs(table: LiveTable, step: StepInput, output: StepOutput, alive: np.ndarray) -> None:
    """Keep what a step yielded for the requests that are still on their rows (alive [B]). A row that failed has no token, so gets
    no value."""
    requests = [*step.prompt_logprobs, *step.sampled_logprobs]
    if not requests:
        return
    for request in step.prompt_logprobs:
        if alive[request.index] and request.targets is not None:
            own = _state(table, int(step.rows[request.index]))
            own.next_input = max(own.next_input, 1) + len(request.targets)
    if output.logprob_values is None or output.logprob_ids is None:
        return  # a replay knows no values
    for request, arrays in unpack_logprobs(requests, output.logprob_values, output.logprob_ids):
        sampled = request.targets is None
        index = int(step.sample_index[request.index]) if sampled else request.index
        if not alive[index]:
            continue
        own = _state(table, int(step.rows[index]))
        if not sampled:
            own.input.append(arrays)
        elif output.next_ids[request.index] >= 0:
            own.output.append(arrays)


def _state(table: LiveTable, row: int) -> ReqLogprobs:
    own = table.req(row).logprobs
    if own is None:
        raise RuntimeError(f"row {row} wants no log-probabilities")
    return own
