"""POST /v1/chat/completions"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...managers.generation import GenerateInput, Generation, written
from ...managers.logprobs.logprob_json import TokenTexts
from ...managers.reasoning.count import ReasoningCount
from ..http_io import JSONReply, apply_headers, event_stream, gone, parse_body, require_json, unless_disconnected
from ..server_state import ServerState, state_of
from .chat_choices import ChatChoices
from .chat_prompt import begins_inside, prompt_ids
from .chat_tools import ChatPlan, plan_chat
from .protocol import ChatBody
from .replies import Reply, Usage, check_model, collect, start


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, n times."""
    require_json(request)
    state = state_of(request)
    tm = state.serving()
    body = await parse_body(request, ChatBody.parse)
    apply_headers(request, body)
    model = check_model(tm, body.model)
    names = {"reasoning_parser": tm.config.reasoning_parser, "tool_call_parser": tm.config.tool_call_parser}
    work = partial(plan_chat, body, state.chat_template, tm.tokenizer, names)
    plan = await asyncio.to_thread(work) if body.tools else work()  # schemas may be large
    if body.stream:
        reply = Reply("chatcmpl", "chat.completion.chunk", model, plan.warning)
        return await event_stream(request, _chunks(state, body, plan, reply), openai=True, headers=reply.headers)
    reply = Reply("chatcmpl", "chat.completion", model, plan.warning)
    answer = await unless_disconnected(request, _answer(state, body, plan, reply))
    return gone() if answer is None else JSONReply(answer, headers=reply.headers)


def _names(body: ChatBody, plan: ChatPlan) -> dict[str, str]:
    """Our names of parameters in the client's words."""
    grammar = "tools" if plan.grammar else None if body.response_format is None else "response_format"
    return {
        "max_new_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "top_logprobs_num": "top_logprobs",
        **({} if grammar is None else dict.fromkeys(("json_schema", "structural_tag"), grammar)),
        "input_ids": "messages",
        "text": "messages",
    }


async def _start(state: ServerState, body: ChatBody, plan: ChatPlan) -> tuple[Generation, ChatChoices, Usage]:
    tm = state.serving()
    ids = await asyncio.to_thread(prompt_ids, state.chat_template, tm.tokenizer, body, plan.tools)
    params = {**body.sampling_params(), **plan.grammar}
    if plan.show_control_tokens:
        params["skip_special_tokens"] = False
    query = GenerateInput(
        input_ids=ids,
        **{**body.service(), "sampling_params": params},
        return_logprob=body.logprobs,
        top_logprobs_num=body.top_logprobs,
        require_reasoning=tm.config.reasoning_parser is not None,
    )
    generation = await start(tm, query, _names(body, plan))
    inside = begins_inside(tm.tokenizer, ids, body, plan.reasoning) if plan.reasoning is not None else None
    choices = ChatChoices(body, generation, TokenTexts(tm.tokenizer), plan, inside=inside)
    return generation, choices, Usage(body.n, ReasoningCount(tm.config.reasoning_parser, tm.tokenizer, ids))


async def _answer(state: ServerState, body: ChatBody, plan: ChatPlan, reply: Reply) -> dict[str, Any]:
    generation, choices, usage = await _start(state, body, plan)
    answers = [await written(choices.whole, output) for output in await collect(generation, usage)]
    return {**reply.body(answers, usage.body()), "metadata": {"weight_version": state.engine().config.weight_version}}


async def _chunks(state: ServerState, body: ChatBody, plan: ChatPlan, reply: Reply) -> AsyncGenerator[dict[str, Any]]:
    """Of each index: the role with its first output, then content, then one chunk with the finish reason and nothing else."""
    generation, choices, usage = await _start(state, body, plan)
    try:
        async for output in generation:
            usage.add(output)
            running = usage.body() if body.wants_running_usage() else None
            for choice in await written(choices.deltas, output):
                yield reply.body([choice], running)
    finally:
        generation.abort()
    if body.wants_usage():
        yield reply.body([], usage.body())
