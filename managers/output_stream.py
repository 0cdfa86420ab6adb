"""OutputStream: which tokens of which requests go to the detokenizer now, and in what message."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .io_struct import DecodeOptions, FinishReason, GenerateReq, TokenOutput, pack_ids, unpack_ids
from .live_table import LiveTable
from .req import NOT_ANNOUNCED, Req
from .sampling_params import SamplingParams

FLUSH_INTERVAL = 50  # tokens between two rows of a request that does not stream


class OutputStream:
    """Sends every request's new tokens exactly once, and its finish reason last. Keeps, by row, how many tokens were sent."""

    def __init__(self, table: LiveTable, send: Callable[[TokenOutput], None]) -> None:
        self._table = table
        self._send = send
        self._sent = np.zeros(len(table.reqs), np.int32)
        self._intervals = np.ones(len(table.reqs), np.int32)

    def seat(self, req: Req) -> None:
        """A request got its row."""
        self._sent[req.row] = max(req.num_sent, 0)
        self._intervals[req.row] = req.params.stream_interval if req.stream else FLUSH_INTERVAL

    def unseat(self, req: Req) -> None:
        """A request is about to lose its row without having finished."""
        if req.num_sent != NOT_ANNOUNCED:
            req.num_sent = int(self._sent[req.row])

    def emit(self, rows: np.ndarray, finished: Mapping[int, FinishReason]) -> None:
        """Send what is due of rows that just got a token, and of the finished rows all that is left."""
        table = self._table
        outputs = table.known_lens[rows] - table.prompt_lens[rows]
        due = (outputs - 1) % self._intervals[rows] == 0
        if finished:
            due |= np.isin(rows, list(finished))
        rows = rows[due]
        if not len(rows):
            return
        outputs = outputs[due]
        reqs = [table.req(row) for row in rows.tolist()]
        starts = (table.prompt_lens[rows] + self._sent[rows]).tolist()
        ends = table.known_lens[rows].tolist()
        ids = [table.tokens[row, start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        self._sent[rows] = outputs
        self._send(
            TokenOutput(
                rids=[req.rid for req in reqs],
                token_ids=pack_ids(np.concatenate(ids)),
                num_ids=[end - start for start, end in zip(starts, ends, strict=True)],
                finish_reasons=[finished.get(row) for row in rows.tolist()],
                prompt_tokens=table.prompt_lens[rows].tolist(),
                completion_tokens=outputs.tolist(),
                cached_tokens=[req.cached_tokens or 0 for req in reqs],
                num_retractions=[req.num_retractions for req in reqs],
                options=[(i, self._announce(req)) for i, req in enumerate(reqs) if req.num_sent == NOT_ANNOUNCED],
            )
        )

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
                options=[(0, self._announce(req))] if req.num_sent == NOT_ANNOUNCED else [],
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

    @staticmethod
    def _announce(req: Req) -> DecodeOptions:
        req.num_sent = 0
        return _decode_options(req.params)


def _decode_options(params: SamplingParams) -> DecodeOptions:
    return DecodeOptions(
        stop=params.stop,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        no_stop_trim=params.no_stop_trim,
    )
