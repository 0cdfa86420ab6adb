"""The JSON of the native /generate, made from a Generation and its Outputs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np

from .errors import RequestError
from .generation import Generation, Output, written
from .io_struct import FinishReason, RowHidden
from .logprobs.logprob_json import TokenTexts, logprobs_json


def finish_reason_json(reason: FinishReason | None) -> dict[str, Any] | None:
    """null while running, else {"type": "stop" | "length" | "abort", ...}."""
    if reason is None:
        return None
    if reason.kind == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.kind == "length":
        return {"type": "length", "length": reason.length}
    more = {"message": reason.message, "status_code": reason.status_code, "err_type": reason.err_type}
    return {"type": reason.kind, **{key: value for key, value in more.items() if value is not None}}


def hidden_json(row: RowHidden, num_prompt: int) -> list[Any]:
    """A list of the states of the prompt's computed tokens first, if ``row`` has any, then those of one output token each.

    Of the newest state alone: a list of it.
    """
    states = np.frombuffer(row.values, "<f4").reshape(row.num, -1).tolist() if row.num else []
    if row.newest:
        return list(states)
    num_first = max(num_prompt - row.first, 0)
    return [states[:num_first], *states[num_first:]] if num_first else states


class GenerateFormat:
    """How one request's answer is written."""

    def __init__(
        self, generation: Generation, *, weight_version: str, with_prompt_ids: bool, texts: TokenTexts | None = None
    ) -> None:
        """texts: log-probabilities come with the tokens' texts."""
        self._texts = texts
        self._generation = generation
        self._weight_version = weight_version
        self._with_prompt_ids = with_prompt_ids

    def item(self, output: Output) -> dict[str, Any]:
        """One choice, as far as it is known."""
        generation = self._generation
        meta: dict[str, Any] = {
            "id": generation.rids[output.index],
            "finish_reason": finish_reason_json(output.finish_reason),
            "prompt_tokens": output.prompt_tokens,
            "weight_version": self._weight_version,
            "num_retractions": output.num_retractions,
            "reasoning_tokens": 0,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
        }
        if output.finish_reason is not None and output.finish_reason.pinned_tokens is not None:
            meta["pinned_tokens"] = output.finish_reason.pinned_tokens
        wanted = generation.logprobs[output.index]
        if wanted is not None:
            meta |= logprobs_json(wanted, output.logprobs, generation.prompts[output.index], output.token_ids, self._texts)
        if output.hidden is not None:
            meta["hidden_states"] = hidden_json(output.hidden, output.prompt_tokens)
        if output.e2e_latency is not None:
            meta["e2e_latency"] = output.e2e_latency
            meta["response_sent_to_client_ts"] = time.time()
            if output.first_token_latency is not None:
                meta["time_to_first_token"] = output.first_token_latency
            meta |= {f"{phase}_time": seconds for phase, seconds in output.phases.items()}
        item: dict[str, Any] = {"text": output.text, "output_ids": list(output.token_ids), "meta_info": meta}
        if self._with_prompt_ids:
            item["prompt_token_ids"] = generation.prompts[output.index]
        return item

    async def chunks(self, *, incremental: bool) -> AsyncGenerator[dict[str, Any], None]:
        """A stream's chunks; each repeats all so far, unless incremental. Batches and n > 1 say which choice with "index"."""
        totals: dict[int, Output] = {}
        async with aclosing(self._generation.__aiter__()) as outputs:
            async for output in outputs:
                known = output
                if not incremental:
                    known = totals.setdefault(output.index, output)
                    if known is not output:
                        known.merge(output)
                item = await written(self.item, known)
                if not self._generation.is_single:
                    item["index"] = output.index
                yield item

    async def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer when all is there: a dict for a single prompt with n == 1, else a list, prompt-major.

        Raises RequestError if every choice was aborted with a status code.
        """
        totals: dict[int, Output] = {}
        async with aclosing(self._generation.__aiter__()) as outputs:
            async for output in outputs:
                known = totals.setdefault(output.index, output)
                if known is not output:
                    known.merge(output)
        reasons = [output.finish_reason for output in totals.values()]
        refused = [reason for reason in reasons if reason is not None and reason.status_code is not None]
        if refused and len(refused) == len(reasons):
            raise _refusal(refused[0])
        items = [await written(self.item, totals[index]) for index in sorted(totals)]
        return items[0] if self._generation.is_single else items


def _refusal(reason: FinishReason) -> RequestError:
    return RequestError(
        reason.message or "The request was aborted.",
        status_code=reason.status_code or 500,
        err_type=reason.err_type or "InternalServerError",
    )
