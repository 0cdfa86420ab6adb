"""Scores: how likely each of some tokens is to come next after a query and an item."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from .errors import RequestError
from .generation import GenerateInput
from .request_size import check_joined
from .tokenizer_manager import TokenizerManager

# Whatever a server prefers for text, scores are of the plain logits.
PLAIN: dict[str, Any] = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "n": 1,
    "temperature": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "bad_words": [],
}


class ScoreInput(msgspec.Struct, kw_only=True):
    """Body of /v1/score. Query and items are all texts or all lists of token ids.

    apply_softmax: over the labels alone, so that they sum to 1; else each is the token's probability among all tokens.
    """

    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None


class Scores(msgspec.Struct, kw_only=True):
    """scores[i][j] belongs to items[i] and label_token_ids[j]."""

    scores: list[list[float]]
    prompt_tokens: int


async def score(tm: TokenizerManager, query: ScoreInput) -> Scores:
    """One request per item, which computes its prompt and nothing else. Raises RequestError that names the field."""
    texts, ids = _prompts(query)
    if not query.label_token_ids:
        raise RequestError("label_token_ids must not be empty.", param="label_token_ids")
    request = GenerateInput(
        text=texts,
        input_ids=ids,
        sampling_params=PLAIN,
        return_logprob=True,
        token_ids_logprob=list(query.label_token_ids),
    )
    try:
        answer = await tm.generate(request)
    except RequestError as error:
        names = {"token_ids_logprob": "label_token_ids", "text": "items", "input_ids": "items"}
        param = names.get(error.param or "", error.param)
        message = error.message.replace(error.param or "\0", param or "")
        raise RequestError(message, param=param, status_code=error.status_code, err_type=error.err_type) from None
    metas = [item["meta_info"] for item in answer if isinstance(item, dict)]
    return Scores(
        scores=[_scores(meta, softmax=query.apply_softmax) for meta in metas],
        prompt_tokens=sum(meta["prompt_tokens"] for meta in metas),
    )


def _prompts(query: ScoreInput) -> tuple[list[str] | None, list[list[int]] | None]:
    items: list[Any] = [query.items] if isinstance(query.items, str) else query.items
    if not items:
        raise RequestError("items must not be empty.", param="items")
    if any(type(item) is not type(query.query) for item in items):
        raise RequestError("query and items must be all texts or all lists of token ids.", param="items")
    check_joined(query.query, items, "items")
    joined: list[Any] = [item + query.query if query.item_first else query.query + item for item in items]
    return (joined, None) if isinstance(query.query, str) else (None, joined)


def _scores(meta: dict[str, Any], *, softmax: bool) -> list[float]:
    reason = meta["finish_reason"]
    if reason["type"] == "abort":
        raise RequestError(
            reason.get("message", "The request was aborted."),
            status_code=reason.get("status_code", 503),
            err_type=reason.get("err_type", "AbortError"),
        )
    values = [value for value, _, _ in meta["output_token_ids_logprobs"][0]]
    top = max(values) if softmax else 0.0
    odds = [math.exp(value - top) for value in values]
    return [odd / sum(odds) for odd in odds] if softmax else odds
