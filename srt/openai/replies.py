"""What the OpenAI routes share: who is asked, how an error names the client's own field, and how usage is counted."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from ...managers.errors import RequestError
from ...managers.generation import GenerateInput, Generation, Output
from ...managers.io_struct import FinishReason
from ...managers.reasoning.count import ReasoningCount
from ...managers.tokenizer_manager import TokenizerManager

ANY_MODEL = frozenset({"", "default"})  # names that clients send when they do not care


def served_names(tm: TokenizerManager) -> list[str]:
    """The model's names, the one in replies first."""
    return [tm.config.served_model_name, *tm.config.served_aliases]


def check_model(tm: TokenizerManager, name: str | None) -> str:
    """The model's name for the reply. Raises RequestError 404 for a model that is not served here."""
    if name is None or name in ANY_MODEL:
        return tm.config.served_model_name
    if name not in (*served_names(tm), tm.config.model_path):
        raise model_not_found(name)
    return name


def model_not_found(name: str) -> RequestError:
    """The 404 of an unknown model."""
    return RequestError(f"The model `{name}` does not exist.", param="model", status_code=404, err_type="NotFoundError")


async def start(tm: TokenizerManager, query: GenerateInput, names: Mapping[str, str]) -> Generation:
    """Start a request; errors name the field as ``names`` translates it."""
    try:
        return await tm.start(query)
    except RequestError as error:
        raise renamed(error, names) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error in the words of another route."""
    message = error.message
    for ours, theirs in names.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    param = names.get(error.param, error.param) if error.param is not None else None
    return RequestError(message, param=param, status_code=error.status_code, err_type=error.err_type)


def checked_reason(reason: FinishReason | None) -> FinishReason | None:
    """Raises RequestError for an abort that is an error (it has a status); an abort by the client is an ordinary end."""
    if reason is not None and reason.kind == "abort" and reason.status_code is not None:
        raise RequestError(
            reason.message or "The request was aborted.",
            status_code=reason.status_code,
            err_type=reason.err_type or "AbortError",
        )
    return reason


class Reply:
    """Identity of one response: every chunk of it carries the same id and time."""

    def __init__(self, prefix: str, kind: str, model: str, warning: str | None = None) -> None:
        """warning: what the reply's header of that name tells."""
        self._warning = warning
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}

    def body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        """The response, or one chunk of it."""
        return {**self._head, "choices": choices, "usage": usage}

    @property
    def headers(self) -> dict[str, str]:
        warning = {} if self._warning is None else {"warning": f'199 - "{self._warning}"'}
        return {"x-request-id": self.id, **warning}


class Usage:
    """Counts of one response. A prompt counts once, whatever n is; its cached tokens are those of its first sample."""

    def __init__(self, n: int, reasoning: ReasoningCount | None = None) -> None:
        self._n = n
        self._reasoning = reasoning
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens: dict[int, int] = {}

    def add(self, output: Output) -> None:
        """Take in an output's totals."""
        prompt, sample = divmod(output.index, self._n)
        self._prompt_tokens[prompt] = output.prompt_tokens
        self._completion_tokens[output.index] = output.completion_tokens
        if self._reasoning is not None:
            self._reasoning.add(output.index, output.token_ids)
        if sample == 0 or prompt not in self._cached_tokens:
            self._cached_tokens[prompt] = output.cached_tokens

    def body(self) -> dict[str, Any]:
        prompt, completion = sum(self._prompt_tokens.values()), sum(self._completion_tokens.values())
        reasoning = self._reasoning.total if self._reasoning is not None else 0
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
            "reasoning_tokens": reasoning,
        }


async def collect(generation: Generation, usage: Usage) -> list[Output]:
    """The whole answer, one merged output per index."""
    outputs: dict[int, Output] = {}
    try:
        async for output in generation:
            checked_reason(output.finish_reason)
            usage.add(output)
            if (known := outputs.get(output.index)) is None:
                outputs[output.index] = output
            else:
                known.merge(output)
    finally:
        generation.abort()
    return [outputs[index] for index in sorted(outputs)]
