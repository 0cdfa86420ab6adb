"""POST /v1/chat/completions"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...managers.chat_template import RESERVED_KWARGS, ChatTemplate
from ...managers.errors import RequestError
from ...managers.generation import GenerateInput, Generation, Output
from ...managers.logprob_json import TokenTexts
from ...managers.sessions import SessionParams
from ...managers.tokenizer import Tokenizer
from ..http_io import JSONReply, apply_headers, event_stream, gone, parse_body, require_json, unless_disconnected
from ..server_state import ServerState, state_of
from .logprobs import chat_logprobs
from .protocol import ChatBody
from .replies import Reply, Usage, check_model, checked_reason, collect, start


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, n times."""
    require_json(request)
    state = state_of(request)
    tm = state.serving()
    body = await parse_body(request, ChatBody.parse)
    apply_headers(request, body)
    model = check_model(tm, body.model)
    if body.stream:
        reply = Reply("chatcmpl", "chat.completion.chunk", model)
        return await event_stream(request, _chunks(state, body, reply), openai=True, headers=reply.headers)
    reply = Reply("chatcmpl", "chat.completion", model)
    answer = await unless_disconnected(request, _answer(state, body, reply))
    return gone() if answer is None else JSONReply(answer, headers=reply.headers)


def _names(body: ChatBody) -> dict[str, str]:
    return {
        "max_new_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "top_logprobs_num": "top_logprobs",
        **({} if body.response_format is None else dict.fromkeys(("json_schema", "structural_tag"), "response_format")),
        "input_ids": "messages",
        "text": "messages",
    }


async def _start(state: ServerState, body: ChatBody) -> Generation:
    tm = state.serving()
    ids = await asyncio.to_thread(prompt_ids, state.chat_template, tm.tokenizer, body)
    query = GenerateInput(
        input_ids=ids,
        sampling_params=body.sampling_params(),
        rid=body.rid,
        stream=body.stream,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        custom_logit_processor=body.custom_logit_processor,
        return_logprob=body.logprobs,
        top_logprobs_num=body.top_logprobs,
        priority=body.priority,
        cache_hint=body.cache_hint.native() if body.cache_hint else None,
        session_id=body.session_id,
        session_params=SessionParams.parse_optional(body.session_params),
        routing_key=body.routing_key,
        timeout=body.timeout,
        require_reasoning=tm.config.reasoning_parser is not None,
        max_thinking_tokens=body.max_thinking_tokens,
    )
    return await start(tm, query, _names(body))


def prompt_ids(template: ChatTemplate | None, tokenizer: Tokenizer, body: ChatBody) -> list[int]:
    """The conversation through the template. A template writes BOS itself, so encoding adds none."""
    if template is None:
        raise RequestError("The model has no chat template; give one with --chat-template.", param="messages")
    for name in RESERVED_KWARGS & body.chat_template_kwargs.keys():
        raise RequestError(f"chat_template_kwargs: `{name}` is reserved.", param="chat_template_kwargs")
    messages = [{**each.model_dump(exclude_none=True), "role": each.role.lower()} for each in body.messages]
    text = template.render(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **body.chat_template_kwargs,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def _choice(body: ChatBody, output: Output, generation: Generation, texts: TokenTexts) -> dict[str, Any]:
    reason = checked_reason(output.finish_reason)
    choice: dict[str, Any] = {
        "index": output.index,
        "message": {"role": "assistant", "content": output.text, "reasoning_content": None, "tool_calls": None},
        "logprobs": chat_logprobs(generation, output, texts),
        "finish_reason": reason.kind if reason else None,
        "matched_stop": reason.matched if reason else None,
    }
    if body.return_token_ids:
        choice["token_ids"] = output.token_ids
        choice["prompt_token_ids"] = generation.prompts[output.index]
    return choice


async def _answer(state: ServerState, body: ChatBody, reply: Reply) -> dict[str, Any]:
    generation = await _start(state, body)
    usage = Usage(body.n)
    texts = TokenTexts(state.engine().tokenizer)
    choices = [_choice(body, output, generation, texts) for output in await collect(generation, usage)]
    return {**reply.body(choices, usage.body()), "metadata": {"weight_version": state.engine().config.weight_version}}


def _delta(index: int, *, role: str | None = None, content: str | None = None) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"role": role, "content": content, "reasoning_content": None, "tool_calls": None},
        "logprobs": None,
        "finish_reason": None,
        "matched_stop": None,
    }


async def _chunks(state: ServerState, body: ChatBody, reply: Reply) -> AsyncGenerator[dict[str, Any]]:
    """Of each index: the role with its first output, then content, then one chunk with the finish reason and nothing else."""
    generation = await _start(state, body)
    usage = Usage(body.n)
    opened: set[int] = set()
    texts = TokenTexts(state.engine().tokenizer)
    try:
        async for output in generation:
            usage.add(output)
            running = usage.body() if body.wants_running_usage() else None
            for choice in _choices(body, output, generation, opened, texts):
                yield reply.body([choice], running)
    finally:
        generation.abort()
    if body.wants_usage():
        yield reply.body([], usage.body())


def _choices(body: ChatBody, output: Output, generation: Generation, opened: set[int], texts: TokenTexts) -> list[dict[str, Any]]:
    """The choices that one output becomes, one chunk each."""
    reason = checked_reason(output.finish_reason)
    index = output.index
    choices = []
    if index not in opened:
        opened.add(index)
        choices.append(_delta(index, role="assistant", content=""))
        if body.return_token_ids:
            choices[0]["prompt_token_ids"] = generation.prompts[index]
    if output.text or ((body.return_token_ids or body.logprobs) and output.token_ids):
        choices.append({**_delta(index, content=output.text), "logprobs": chat_logprobs(generation, output, texts)})
        if body.return_token_ids:
            choices[-1]["token_ids"] = output.token_ids
    if reason is not None:
        choices.append({**_delta(index), "finish_reason": reason.kind, "matched_stop": reason.matched})
    return choices
