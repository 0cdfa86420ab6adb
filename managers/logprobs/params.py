"""The fields of a request that ask for log-probabilities, checked."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import RequestError
from ..generation import GenerateInput
from ..io_struct import LogprobParams
from ..per_prompt import per_prompt

MAX_TOKEN_IDS = 1024


def logprob_plans(request: GenerateInput, num_prompts: int, *, max_top_num: int, vocab_size: int) -> list[LogprobParams | None]:
    """Of each prompt, None where none are wanted. start_len is as given, -1 for none of the prompt."""
    wanted = per_prompt(request.return_logprob, num_prompts, "return_logprob", False)
    if not any(wanted):
        return [None] * num_prompts
    starts = per_prompt(request.logprob_start_len, num_prompts, "logprob_start_len", -1)
    top_nums = per_prompt(request.top_logprobs_num, num_prompts, "top_logprobs_num", 0)
    token_ids = _token_ids(request.token_ids_logprob, num_prompts)
    for start in set(starts):
        if start < -1:
            raise RequestError(f"logprob_start_len must be at least -1, got {start}.", param="logprob_start_len")
    for top_num in set(top_nums):
        if not 0 <= top_num <= max_top_num:
            raise RequestError(f"top_logprobs_num must be in [0, {max_top_num}], got {top_num}.", param="top_logprobs_num")
    for ids in {id(ids): ids for ids in token_ids}.values():  # prompts may share them
        if len(ids) > MAX_TOKEN_IDS or not all(0 <= token_id < vocab_size for token_id in ids):
            raise RequestError(
                f"token_ids_logprob: at most {MAX_TOKEN_IDS} ids in [0, {vocab_size - 1}].", param="token_ids_logprob"
            )
    return [
        LogprobParams(start_len=start, top_num=top_num, token_ids=ids) if want else None
        for want, start, top_num, ids in zip(wanted, starts, top_nums, token_ids, strict=True)
    ]


def with_start(params: LogprobParams | None, num_prompt: int, *, default: int | None = None) -> LogprobParams | None:
    """With the start that -1 stands for: ``default``, else none of the prompt. Raises RequestError for one behind the prompt."""
    if params is None:
        return None
    if params.start_len > num_prompt:
        raise RequestError(
            f"logprob_start_len ({params.start_len}) is behind the prompt ({num_prompt} tokens).", param="logprob_start_len"
        )
    if params.start_len >= 0:
        return params
    return msgspec.structs.replace(params, start_len=num_prompt if default is None else default)


def _token_ids(given: list[Any] | None, num_prompts: int) -> list[list[int]]:
    if not given or all(isinstance(item, int) for item in given):
        return [list(given or [])] * num_prompts
    if any(isinstance(item, int) for item in given):
        raise RequestError("token_ids_logprob must be a list of ids, or a list of such lists.", param="token_ids_logprob")
    return [list(item or []) for item in per_prompt(given, num_prompts, "token_ids_logprob", None)]
