"""What a request's own parameters do to its logits: penalties, logit_bias, allowed ids, bad words, logit processor, in this order.

The state of a row, its output so far, lives on the device and takes in each sampled token there, so that it is exact although the
host learns of a token a step later. Nothing of a row depends on the other rows.

Legend: V vocabulary, N output tokens so far, W bad words, K longest bad word less its last token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch

from .logit_processor import LogitProcessor
from .sampling_input import RowControls

logger = logging.getLogger(__name__)

NO_TOKEN = -1  # fills what comes before the first output token
MIN_CAPACITY = 256
IMPOSSIBLE = float("-inf")


class RowEdits:
    """The controls of one row and its output."""

    def __init__(self, controls: RowControls, vocab_size: int, device: torch.device, processor: LogitProcessor | None) -> None:
        self._controls = controls
        self._processor = processor
        self._bad_words = _BadWords(controls.bad_words, device) if controls.bad_words else None
        self._pad = self._bad_words.width if self._bad_words else 0
        self._num_output = len(controls.output_ids)
        self._output = torch.full((self._pad + self._num_output + MIN_CAPACITY,), NO_TOKEN, dtype=torch.int64, device=device)
        output = _ids(controls.output_ids, device)
        self._output[self._pad : self._pad + self._num_output] = output
        self._prompt = _ids(controls.prompt_ids, device)
        self._prompt_set = (
            torch.from_numpy(np.unique(controls.prompt_ids).astype(np.int64)).to(device)
            if controls.repetition_penalty != 1
            else None
        )
        self._counts: torch.Tensor | None = None
        if controls.frequency_penalty:
            self._counts = torch.bincount(output, minlength=vocab_size).to(torch.int32)
        self._bias = self._allowed = None
        if controls.bias_ids is not None and controls.bias_values is not None:
            self._bias = _ids(controls.bias_ids, device), torch.from_numpy(controls.bias_values).to(device)
        if controls.allowed_ids is not None:
            self._allowed = _ids(controls.allowed_ids, device)

    @property
    def output_ids(self) -> torch.Tensor:
        """int64 [N]"""
        return self._output[self._pad : self._pad + self._num_output]

    def push(self, token: torch.Tensor) -> None:
        """Take in the token, int64 [], that the row has just sampled."""
        end = self._pad + self._num_output
        if end == len(self._output):
            self._output = torch.cat([self._output, torch.full_like(self._output, NO_TOKEN)])
        token = token.clamp(min=0)  # of a row that failed
        self._output[end] = token
        self._num_output += 1
        if self._counts is not None:
            self._counts[token] += 1

    def apply(self, logits_V: torch.Tensor) -> None:
        """Edit the row's logits in place."""
        self._penalise(logits_V)
        if self._bias is not None:
            ids, values = self._bias
            logits_V[ids] += values
        if self._allowed is not None:
            kept = logits_V[self._allowed]
            logits_V.fill_(IMPOSSIBLE)
            logits_V[self._allowed] = kept
        if self._bad_words is not None:
            self._bad_words.ban(logits_V, self._output[: self._pad + self._num_output])
        if self._processor is not None:
            changed = self._processor(self._prompt, self.output_ids, logits_V)
            if changed is not logits_V:
                logits_V.copy_(changed)

    def _penalise(self, logits_V: torch.Tensor) -> None:
        """An id that occurs twice among the ids is written twice with the same value."""
        controls, output = self._controls, self.output_ids
        if self._prompt_set is not None:
            ids = torch.cat([self._prompt_set, output])
            values = logits_V[ids]
            penalty = controls.repetition_penalty
            logits_V[ids] = torch.where(values > 0, values / penalty, values * penalty)
        if self._num_output and (controls.frequency_penalty or controls.presence_penalty):
            values = logits_V[output] - controls.presence_penalty
            if self._counts is not None:
                values -= controls.frequency_penalty * self._counts[output]
            logits_V[output] = values


class _BadWords:
    """Token sequences of which the last token is impossible where the others come right before it in the output."""

    def __init__(self, words: list[list[int]], device: torch.device) -> None:
        self.width = max(len(word) for word in words) - 1
        heads = np.full((len(words), self.width), NO_TOKEN, np.int64)
        for index, word in enumerate(words):
            heads[index, self.width - len(word) + 1 :] = word[:-1]
        self._heads_WK = torch.from_numpy(heads).to(device)
        self._any_WK = self._heads_WK == NO_TOKEN
        self._last_W = torch.tensor([word[-1] for word in words], device=device)

    def ban(self, logits_V: torch.Tensor, output: torch.Tensor) -> None:
        """output: int64, begins with at least ``width`` times NO_TOKEN."""
        tail_K = output[len(output) - self.width :]
        matches_W = ((self._heads_WK == tail_K) | self._any_WK).all(dim=1)
        limits_W = torch.full_like(self._last_W, float("inf"), dtype=logits_V.dtype).masked_fill_(matches_W, IMPOSSIBLE)
        logits_V.scatter_reduce_(0, self._last_W, limits_W, "amin")


class LogitEdits:
    """The rows that have controls."""

    def __init__(self, vocab_size: int, device: torch.device, processors: Mapping[str, type[LogitProcessor]]) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._processors = processors
        self._rows: dict[int, RowEdits | None] = {}  # None: its logit processor failed

    def update(self, controls: Mapping[int, RowControls | None]) -> None:
        """Rows have new owners. Memory is bounded by the number of rows."""
        for row, own in controls.items():
            self._rows.pop(row, None)
            if own is not None:
                self._rows[row] = self._make(row, own)

    def _make(self, row: int, controls: RowControls) -> RowEdits | None:
        processor: LogitProcessor | None = None
        if controls.processor:
            try:
                processor = self._processors[controls.processor](controls.custom_params)
            except Exception:  # it is the operator's code, and other rows are other requests
                logger.exception("logit processor %s cannot be made", controls.processor)
                return None
        return RowEdits(controls, self._vocab_size, self._device, processor)

    def apply(self, rows: np.ndarray, logits_SV: torch.Tensor) -> None:
        """Edit the logits of ``rows`` [S] in place. A row whose processor fails gets NaN, hence fails."""
        for index, row in self._edited(rows):
            edits = self._rows[row]
            if edits is None:
                logits_SV[index].fill_(float("nan"))
                continue
            try:
                edits.apply(logits_SV[index])
            except Exception:
                logger.exception("the logits of a request cannot be edited")
                self._rows[row] = None
                logits_SV[index].fill_(float("nan"))

    def push(self, rows: np.ndarray, next_ids: torch.Tensor) -> None:
        """Take in what ``rows`` [S] have sampled, int64 [S]."""
        for index, row in self._edited(rows):
            edits = self._rows[row]
            if edits is not None:
                edits.push(next_ids[index])

    def _edited(self, rows: np.ndarray) -> list[tuple[int, int]]:
        if not self._rows:
            return []
        return [(index, row) for index, row in enumerate(rows.tolist()) if row in self._rows]


def _ids(ids: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)
