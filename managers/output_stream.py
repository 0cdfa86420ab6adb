"""OutputStream: which tokens of which requests go to the detokenizer now, and in what message."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .io_struct import DecodeOptions, FinishReason, GenerateReq, RowHidden, RowLogprobs, TokenOutput, pack_ids, unpack_ids
from .live_table import LiveTable
from .req import NOT_ANNOUNCED, Req
from .sampling_params import SamplingParams

FLUSH_INTERVAL = 50  # tokens between two rows of a request that does not stream


class OutputStream:
    """Sends every request's new tokens exactly once, and its finish reason last. Keeps its columns by row, as the table does."""

    def __init__(self, table: LiveTable, send: Callable[[TokenOutput], None]) -> None:
        num_rows = len(table.reqs)
        self._table = table
        self._send = send
        self._rids = [""] * num_rows
        self._sent = np.zeros(num_rows, np.int32)  # output tokens handed to the detokenizer
        self._announced = np.zeros(num_rows, np.bool_)
        self._intervals = np.ones(num_rows, np.int32)
        self._cached_tokens = np.zeros(num_rows, np.int32)
        self._num_retractions = np.zeros(num_rows, np.int32)

    def seat(self, req: Req) -> None:
        """A request got its row."""
        row = req.row
        self._rids[row] = req.rid
        self._sent[row] = max(req.num_sent, 0)
        self._announced[row] = req.num_sent != NOT_ANNOUNCED
        self._intervals[row] = req.params.stream_interval if req.stream else FLUSH_INTERVAL
        self._cached_tokens[row] = req.cached_tokens or 0
        self._num_retractions[row] = req.num_retractions

    def unseat(self, req: Req) -> None:
        """A request is about to lose its row without having finished."""
        if self._announced[req.row]:
            req.num_sent = int(self._sent[req.row])

    def emit(self, rows: np.ndarray, finished: Mapping[int, FinishReason]) -> None:
        """Send what is due of rows that just got a token, and of the finished rows all that is left."""
        table = self._table
        outputs = table.known_lens[rows] - table.prompt_lens[rows]
        # A step may bring several tokens: due is what has passed a multiple since it was sent. Nothing sent yet: -1 // interval.
        due = (outputs - 1) // self._intervals[rows] != (self._sent[rows] - 1) // self._intervals[rows]
        if finished:
            due |= np.isin(rows, list(finished))
        if not due.all():
            rows, outputs = rows[due], outputs[due]
        if not len(rows):
            return
        names = rows.tolist()
        num_ids = outputs - self._sent[rows]
        prompt_lens = table.prompt_lens[rows]
        new = self._announce(rows)
        message = TokenOutput(
            rids=[self._rids[row] for row in names],
            token_ids=pack_ids(self._new_ids(rows, prompt_lens + self._sent[rows], num_ids)),
            num_ids=num_ids.tolist(),
            finish_reasons=[finished.get(row) for row in names] if finished else [None] * len(names),
            prompt_tokens=prompt_lens.tolist(),
            completion_tokens=outputs.tolist(),
            cached_tokens=self._cached_tokens[rows].tolist(),
            num_retractions=self._num_retractions[rows].tolist(),
            options=[(index, _decode_options(req.params)) for index, req in new],
            logprobs=self._logprobs(rows),
            hidden=self._hidden(rows),
            timings=[(index, req.timings()) for index, req in new],
        )
        self._sent[rows] = outputs
        self._send(message)

    def _new_ids(self, rows: np.ndarray, starts: np.ndarray, num_ids: np.ndarray) -> np.ndarray:
        tokens = self._table.tokens
        if (num_ids == 1).all():
            newest: np.ndarray = tokens[rows, starts]
            return newest
        return np.concatenate([tokens[row, start : start + n] for row, start, n in zip(rows, starts, num_ids, strict=True)])

    def _logprobs(self, rows: np.ndarray) -> list[tuple[int, RowLogprobs]]:
        """Of the new tokens of the rows that want them, and of their prompts with their first row."""
        wanted = np.flatnonzero(self._table.logprobs[rows]).tolist()
        owners = [(index, self._table.req(int(rows[index])).logprobs) for index in wanted]
        return [(index, own.flush()) for index, own in owners if own is not None]

    def _hidden(self, rows: np.ndarray) -> list[tuple[int, RowHidden]]:
        wanted = np.flatnonzero(self._table.hidden[rows]).tolist()
        owners = [(index, self._table.req(int(rows[index])).hidden) for index in wanted]
        return [(index, own.flush()) for index, own in owners if own is not None]

    def _announce(self, rows: np.ndarray) -> list[tuple[int, Req]]:
        """The requests that send their first row, with their places among ``rows``."""
        new = np.flatnonzero(~self._announced[rows])
        self._announced[rows[new]] = True
        return [(int(i), self._table.req(int(rows[i]))) for i in new]

    def emit_waiting(self, req: Req, reason: FinishReason) -> None:
        """The last row of a request that has no row in the table."""
        output = req.token_ids[req.num_prompt :]
        unsent = output[max(req.num_sent, 0) :]
        self._send(
            TokenOutput(
                rids=[req.rid],
                token_ids=pack_ids(unsent),
                num_ids=[len(unsent)],
                finish_reasons=[reason],
                prompt_tokens=[req.num_prompt],
                completion_tokens=[len(output)],
                cached_tokens=[req.cached_tokens or 0],
                num_retractions=[req.num_retractions],
                options=[(0, _decode_options(req.params))] if req.num_sent == NOT_ANNOUNCED else [],
                logprobs=[(0, req.logprobs.flush())] if req.logprobs else [],
                hidden=[(0, req.hidden.flush())] if req.hidden else [],
            )
        )

    def refuse(self, message: GenerateReq, reason: FinishReason) -> None:
        """The only row of a request that could not be queued."""
        self._send(
            TokenOutput(
                rids=[message.rid],
                token_ids=b"",
                num_ids=[0],
                finish_reasons=[reason],
                prompt_tokens=[len(unpack_ids(message.input_ids))],
                completion_tokens=[0],
                cached_tokens=[0],
                num_retractions=[0],
                options=[(0, _decode_options(message.sampling_params))],
            )
        )


def _decode_options(params: SamplingParams) -> DecodeOptions:
    return DecodeOptions(
        stop=params.stop,
        stop_regex=params.stop_regex,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        no_stop_trim=params.no_stop_trim,
    )
