"""POST /v1/completions"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...managers.errors import RequestError
from ...managers.generation import GenerateInput, Generation, Output, written
from ...managers.tokenizer_manager import TokenizerManager
from ..http_io import JSONReply, apply_headers, event_stream, gone, parse_body, require_json, unless_disconnected
from ..server_state import state_of
from .hidden import LastStates
from .logprobs import CompletionLogprobs
from .protocol import CompletionBody
from .replies import Reply, Usage, check_model, checked_reason, collect, start

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "input_ids": "prompt",
    "text": "prompt",
    "top_logprobs_num": "logprobs",
}


def _names(body: CompletionBody) -> dict[str, str]:
    return NAMES if body.response_format is None else NAMES | dict.fromkeys(("json_schema", "structural_tag"), "response_format")


async def completions(request: Request) -> Response:
    """Complete one prompt or several, each n times."""
    require_json(request)
    tm = state_of(request).serving()
    body = await parse_body(request, CompletionBody.parse)
    apply_headers(request, body)
    model = check_model(tm, body.model)
    if body.best_of is not None and body.best_of > body.n:
        raise RequestError("best_of greater than n is not supported.", param="best_of")
    reply = Reply("cmpl", "text_completion", model)
    if body.stream:
        return await event_stream(request, _chunks(tm, body, reply), openai=True, headers=reply.headers)
    answer = await unless_disconnected(request, _answer(tm, body, reply))
    return gone() if answer is None else JSONReply(answer, headers=reply.headers)


def _query(body: CompletionBody) -> GenerateInput:
    kinds = {type(item) for item in body.prompt} if isinstance(body.prompt, list) else {str}
    return GenerateInput(
        text=body.prompt if kinds == {str} else None,
        input_ids=None if kinds == {str} else body.prompt,
        return_logprob=body.logprobs is not None,
        top_logprobs_num=body.logprobs,
        logprob_start_len=0 if body.echo else -1,
        **body.service(),
    )


async def _echoes(tm: TokenizerManager, body: CompletionBody, generation: Generation) -> list[str]:
    """Text of the prompt of each index; empty strings without echo."""
    if not body.echo:
        return [""] * len(generation.rids)
    if isinstance(body.prompt, str):
        return [body.prompt] * body.n
    if isinstance(body.prompt[0], str):
        return [text for text in body.prompt for _ in range(body.n)]
    skip = body.skip_special_tokens
    decode = tm.tokenizer.decode
    return [await asyncio.to_thread(decode, ids, skip_special_tokens=skip) for ids in generation.prompts]


class _Choices:
    """Writes outputs as choices; ``echoes`` are put before the first of each index."""

    def __init__(self, tm: TokenizerManager, body: CompletionBody, generation: Generation, echoes: list[str]) -> None:
        self._tm, self._body, self._generation = tm, body, generation
        self._echoes = dict(enumerate(echoes))
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._hidden = LastStates(wanted=bool(body.return_hidden_states))

    def write(self, output: Output) -> dict[str, Any]:
        """One output as a choice."""
        echo = self._echoes.pop(output.index, None)
        choice = _choice(self._body, output, self._generation)
        choice["text"] = (echo or "") + output.text
        choice |= self._hidden.field(output)
        if self._body.logprobs is not None:
            choice["logprobs"] = self._write_logprobs(output, echo)
        return choice

    def _write_logprobs(self, output: Output, echo: str | None) -> dict[str, Any]:
        body, index = self._body, output.index
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(
                self._generation, index, self._tm.tokenizer, skip_special=body.skip_special_tokens
            )
        if body.echo and echo is not None:
            prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
            self._logprobs[index].echo(self._generation, output, echo, as_given=isinstance(prompt, str))
        return self._logprobs[index].part(output)


def _choice(body: CompletionBody, output: Output, generation: Generation) -> dict[str, Any]:
    reason = checked_reason(output.finish_reason)
    choice: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "logprobs": None,
        "finish_reason": reason.kind if reason else None,
        "matched_stop": reason.matched if reason else None,
    }
    if body.return_token_ids:
        choice["token_ids"] = output.token_ids
        choice["prompt_token_ids"] = generation.prompts[output.index]
    return choice


async def _answer(tm: TokenizerManager, body: CompletionBody, reply: Reply) -> dict[str, Any]:
    generation = await start(tm, _query(body), _names(body))
    usage = Usage(body.n)
    outputs = await collect(generation, usage)
    echoes = await _echoes(tm, body, generation)
    writer = _Choices(tm, body, generation, echoes)
    choices = [await written(writer.write, output) for output in outputs]
    return {**reply.body(choices, usage.body()), "metadata": {"weight_version": tm.config.weight_version}}


async def _chunks(tm: TokenizerManager, body: CompletionBody, reply: Reply) -> AsyncGenerator[dict[str, Any]]:
    """One chunk per output that tells something. Clients read choices[0] of each, so only a usage chunk they asked for has none."""
    generation = await start(tm, _query(body), _names(body))
    usage = Usage(body.n)
    try:
        writer = _Choices(tm, body, generation, await _echoes(tm, body, generation))
        tells_tokens = body.return_token_ids or body.logprobs is not None
        async for output in generation:
            usage.add(output)
            choice = await written(writer.write, output)
            if choice["text"] or output.finish_reason or (tells_tokens and output.token_ids):
                yield reply.body([choice], usage.body() if body.wants_running_usage() else None)
    finally:
        generation.abort()
    if body.wants_usage():
        yield reply.body([], usage.body())
