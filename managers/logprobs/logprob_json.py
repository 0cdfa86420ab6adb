"""Log-probabilities as they are told: decoded from the bytes in which they travel, with their tokens, and as the native JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..io_struct import LogprobColumns, LogprobParams, RowLogprobs
from ..tokenizer import Tokenizer

Triple = tuple[float | None, int, str | None]


class TokenLogprob(NamedTuple):
    """Of one token: its own, the best alternatives', those of the ids that the request named. None at position 0 of a prompt."""

    token_id: int
    value: float | None
    top: list[tuple[float, int]] | None
    named: list[tuple[float, int]] | None


class TokenTexts:
    """Bytes and text of single tokens, special ones included. What is no whole character shows as U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.byte_table

    def bytes_of(self, token_id: int) -> bytes:
        if self._table is not None:
            return self._table.tokens[token_id] if token_id < len(self._table.tokens) else b""
        return self.text_of(token_id).encode()

    def text_of(self, token_id: int) -> str:
        if self._table is not None:
            return self.bytes_of(token_id).decode("utf-8", "replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def output_logprobs(params: LogprobParams, row: RowLogprobs | None, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """One per output token."""
    return list(_decoded(params, row.output, token_ids)) if row is not None else []


def input_logprobs(params: LogprobParams, row: RowLogprobs | None, prompt: Sequence[int]) -> list[TokenLogprob]:
    """Of the prompt from start_len on, as far as they were computed; empty if ``row`` is not the first of its request.

    With token_ids and nothing of the prompt there is one entry without values, for the last token: clients of SGLang count on it.
    """
    if row is None or row.input is None:
        return []
    if params.start_len >= len(prompt):
        return [TokenLogprob(prompt[-1], None, None, None)] if params.token_ids else []
    first = [TokenLogprob(prompt[0], None, None, None)] if params.start_len == 0 else []
    return [*first, *_decoded(params, row.input, prompt[max(params.start_len, 1) :])]


def _decoded(params: LogprobParams, columns: LogprobColumns, token_ids: Sequence[int]) -> Iterator[TokenLogprob]:
    values = np.frombuffer(columns.values, "<f4").tolist()
    top_num, named_ids = params.top_num, params.token_ids
    top_values = np.frombuffer(columns.top_values, "<f4").reshape(len(values), top_num).tolist()
    top_ids = np.frombuffer(columns.top_ids, "<i4").reshape(len(values), top_num).tolist()
    named = np.frombuffer(columns.id_values, "<f4").reshape(len(values), len(named_ids)).tolist()
    for index, (value, token_id) in enumerate(zip(values, token_ids, strict=False)):
        top = list(zip(top_values[index], top_ids[index], strict=True))
        yield TokenLogprob(token_id, value, top, list(zip(named[index], named_ids, strict=True)))


def logprobs_json(
    params: LogprobParams, row: RowLogprobs | None, prompt: Sequence[int], token_ids: Sequence[int], texts: TokenTexts | None
) -> dict[str, Any]:
    """What meta_info of the native /generate says."""
    found = {"input": input_logprobs(params, row, prompt), "output": output_logprobs(params, row, token_ids)}

    def triple(value: float | None, token_id: int) -> Triple:
        return value, token_id, None if texts is None else texts.text_of(token_id)

    def triples(pairs: list[tuple[float, int]] | None) -> list[Triple] | None:
        return None if pairs is None else [triple(*pair) for pair in pairs]

    meta: dict[str, Any] = {"output_token_logprobs_length": len(found["output"])}
    for side, tokens in found.items():
        meta[f"{side}_token_logprobs"] = [triple(token.value, token.token_id) for token in tokens]
        if params.top_num:
            meta[f"{side}_top_logprobs"] = [triples(token.top) for token in tokens]
        if params.token_ids:
            meta[f"{side}_token_ids_logprobs"] = [triples(token.named) for token in tokens]
    return meta
