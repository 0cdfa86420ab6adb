"""Messages of a chat request to the tokens of its prompt."""

from __future__ import annotations

from typing import Any

from ...managers.chat_template import RESERVED_KWARGS, ChatTemplate
from ...managers.errors import RequestError
from ...managers.plain_text import encode_marked, marker_of
from ...managers.reasoning.parser import marks_of
from ...managers.tokenizer import Tokenizer
from ...managers.tool_parsers.json_text import loads
from .protocol import ChatBody

NO_TEMPLATE = "The model has no chat template; give one with --chat-template."


def prompt_ids(
    template: ChatTemplate | None, tokenizer: Tokenizer, body: ChatBody, tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """The conversation through the template. A template writes BOS itself, so encoding adds none.

    tools: what the template is shown, None for the body's own. Control tokens in messages and tools are text, unless the body says
    otherwise. Raises RequestError, with the template's own words if it refuses the messages.
    """
    return encode_marked(tokenizer, rendered(template, tokenizer, body, tools))


def rendered(template: ChatTemplate | None, tokenizer: Tokenizer, body: ChatBody, tools: list[dict[str, Any]] | None) -> str:
    """Text with marks, for encode_marked."""
    if template is None:
        raise RequestError(NO_TEMPLATE, param="messages")
    for name in RESERVED_KWARGS & body.chat_template_kwargs.keys():
        raise RequestError(f"chat_template_kwargs: `{name}` is reserved.", param="chat_template_kwargs")
    messages = [_message(each.model_dump(exclude_none=True)) for each in body.messages]
    if tools is None:
        tools = [] if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools]
    if not body.special_tokens_in_content:
        marker = marker_of(tokenizer)
        messages = [marker.marked(message) for message in messages]
        tools = [marker.marked(tool) for tool in tools]
    options: dict[str, Any] = {
        **template_variables(body),
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    try:
        return template.render(messages, tools=tools, **options)
    except RequestError as error:
        if not tools:
            raise
        try:  # some templates want the functions alone
            return template.render(messages, tools=[tool["function"] for tool in tools], **options)
        except RequestError:
            raise error from None


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message.get("reasoning"), str):  # another spelling
        message.setdefault("reasoning_content", message["reasoning"])
    for call in message.get("tool_calls", []):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _unescaped(function["arguments"])
    return {**message, "role": message["role"].lower()}


def _unescaped(arguments: str) -> Any:
    """Arguments in which a control token may hide behind escapes, as the object that they are."""
    if "\\" not in arguments:
        return arguments
    try:
        return loads(arguments)
    except ValueError:
        return arguments


def template_variables(body: ChatBody) -> dict[str, Any]:
    """What the template is told of thinking: reasoning_effort, and enable_thinking and thinking if the request has an opinion."""
    options = body.reasoning
    effort = body.reasoning_effort if body.reasoning_effort is not None else options.effort if options else None
    variables: dict[str, Any] = dict(body.chat_template_kwargs)
    wanted = options.enabled if options is not None and options.enabled is not None else None
    if wanted is None and effort is not None:
        wanted = effort != "none"
    if wanted is not None:
        variables.setdefault("enable_thinking", wanted)
        variables.setdefault("thinking", wanted)
    if effort is not None and effort != "none":
        variables.setdefault("reasoning_effort", effort)
    return variables


def begins_inside(tokenizer: Tokenizer, ids: list[int], body: ChatBody, reasoning: str) -> bool | None:
    """Whether an answer begins inside the thinking, as far as the prompt tells: None if it leaves that to the model."""
    marks = marks_of(reasoning)
    tail = tokenizer.decode(ids[-64:], skip_special_tokens=False).rstrip()
    if body.continue_final_message:
        content = body.messages[-1].content
        text = content if isinstance(content, str) else "".join(part.text for part in content or [])
        if marks.start in text or marks.end in text:
            return text.rfind(marks.start) > text.rfind(marks.end)
    if tail.endswith(marks.end):
        return False
    return True if tail.endswith(marks.start.rstrip()) else None
