"""Text to token ids and back, without generating anything."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from ..managers.errors import RequestError
from ..managers.tokenizer_manager import TokenizerManager
from .http_io import JSONReply, parse_body
from .openai.chat_prompt import prompt_ids
from .openai.protocol import ChatBody
from .server_state import ServerState, state_of
from .struct_body import body_of, parse_struct, struct_parser

CHAT_FIELDS = ("messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message", "chat_template_kwargs")

router = APIRouter()


class TokenizeInput(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a prompt, a list of prompts, or a conversation, which goes through the chat template.

    add_special_tokens counts for prompts only: a template writes its own.
    """

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    model: str | None = None


class DetokenizeInput(msgspec.Struct, kw_only=True):
    """Body of /detokenize: the ids of a text, or of several."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool = True
    model: str | None = None


def _parse_tokenize(values: dict[str, Any]) -> TokenizeInput:
    query = parse_struct(TokenizeInput, values)
    if (query.prompt is None) == (query.messages is None):
        raise RequestError("Exactly one of prompt and messages must be given.", param="prompt")
    return query


@router.post("/tokenize", openapi_extra=body_of(TokenizeInput))
@router.post("/v1/tokenize", openapi_extra=body_of(TokenizeInput))
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, of several, or of a conversation; how many; and the model's context length."""
    state = state_of(request)
    tm = state.engine()
    query = await parse_body(request, _parse_tokenize)
    tokens = await tm.in_pool(_tokens, state, tm, query)
    count = [len(ids) for ids in tokens] if isinstance(query.prompt, list) else len(tokens)
    return JSONReply({"tokens": tokens, "count": count, "max_model_len": tm.info.model.context_len})


def _tokens(state: ServerState, tm: TokenizerManager, query: TokenizeInput) -> Any:
    if query.messages is not None:
        given = {name: getattr(query, name) for name in CHAT_FIELDS}
        return prompt_ids(state.chat_template, tm.tokenizer, ChatBody.parse(given))
    texts = query.prompt if isinstance(query.prompt, list) else [query.prompt or ""]
    ids = [tm.tokenizer.encode(text, add_special_tokens=query.add_special_tokens) for text in texts]
    return ids if isinstance(query.prompt, list) else ids[0]


@router.post("/detokenize", openapi_extra=body_of(DetokenizeInput))
@router.post("/v1/detokenize", openapi_extra=body_of(DetokenizeInput))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    tm = state_of(request).engine()
    query = await parse_body(request, struct_parser(DetokenizeInput))
    return JSONReply({"text": await tm.in_pool(_text, tm, query)})


def _text(tm: TokenizerManager, query: DetokenizeInput) -> str | list[str]:
    single = not query.tokens or isinstance(query.tokens[0], int)
    batch: list[Any] = [query.tokens] if single else query.tokens
    limit = tm.info.model.vocab_size
    for ids in batch:
        if not isinstance(ids, list) or not all(isinstance(token, int) and 0 <= token < limit for token in ids):
            raise RequestError(f"tokens must be a list of ids in [0, {limit - 1}], or a list of such lists.", param="tokens")
    texts = [tm.tokenizer.decode(ids, skip_special_tokens=query.skip_special_tokens) for ids in batch]
    return texts[0] if single else texts


def install(app: FastAPI) -> None:
    """Add the routes."""
    app.include_router(router)
