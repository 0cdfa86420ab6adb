"""What a chat request asks of tools and thinking: the grammar that its output follows and the parser that reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...managers.chat_template import ChatTemplate
from ...managers.constrained.tool_grammar import calls_schema, strict_tag
from ...managers.errors import RequestError
from ...managers.reasoning.parser import OutputParser, marks_of, output_parser
from ...managers.tokenizer import Tokenizer
from ...managers.tool_parsers.events import Tools
from ...managers.tool_parsers.registry import TOOL_PARSERS, parser_for
from .protocol import ChatBody
from .tool_protocol import NamedChoice

GRAMMAR_FIELDS = ("response_format", "json_schema", "regex", "ebnf", "structural_tag")
JSON_CALLS = "json"  # the parser of calls that are decoded as a JSON array
NOT_SHOWN = "the model's chat template does not show the tools to it"
NOT_ENFORCED = "strict is not enforced with tool_choice auto and this model's format of calls"


class ChatPlan(msgspec.Struct, kw_only=True):
    """How the answers of one request are decoded and read."""

    tools: list[dict[str, Any]] = []  # for the template
    offered: dict[str, dict[str, Any]] = {}  # name -> schema, for parser and grammar
    calls: str | None = None  # parser of calls
    reasoning: str | None = None  # parser of the thinking
    grammar: dict[str, Any] = {}  # sampling parameters
    show_control_tokens: bool = False  # they mark calls or thinking
    parallel: bool = True
    warning: str | None = None

    def parser(self, *, inside: bool | None) -> OutputParser:
        """A parser for one answer; inside as output_parser takes it."""
        return output_parser(self.reasoning, self.calls, tools=self.offered, inside=inside)


def plan_chat(body: ChatBody, template: ChatTemplate | None, tokenizer: Tokenizer, names: Mapping[str, str | None]) -> ChatPlan:
    """Read the request's fields. names: tool_call_parser and reasoning_parser of the server. Raises RequestError."""
    plan = ChatPlan(reasoning=names["reasoning_parser"] if body.separate_reasoning else None, parallel=body.parallel_tool_calls)
    choice = body.tool_choice or ("auto" if body.tools else "none")
    _check(body, choice)
    if choice != "none":
        plan.tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        _plan_calls(plan, body, names["tool_call_parser"] or parser_for(template.sources() if template else ""))
        plan.warning = None if template is None or template.shows_tools() else NOT_SHOWN
    _show_marks(plan, tokenizer)
    _plan_strict(plan, body)
    return plan


def _check(body: ChatBody, choice: str | NamedChoice) -> None:
    known = [tool.function.name for tool in body.tools]
    if len(set(known)) < len(known):
        raise RequestError("tools: two functions have the same name.", param="tools")
    if choice in ("none", "auto"):
        return
    if not body.tools:
        raise RequestError("Tools cannot be empty if tool choice is set to required.", param="tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in known:
        raise RequestError(f"tool_choice: {choice.function.name!r} is not one of the tools.", param="tool_choice")
    for name in GRAMMAR_FIELDS:
        given = getattr(body, name)
        if given is not None and (name != "response_format" or given.grammar()):
            raise RequestError(f"tool_choice required or named cannot be used together with {name}.", param="tool_choice")


def _plan_calls(plan: ChatPlan, body: ChatBody, parser: str | None) -> None:
    choice = body.tool_choice or "auto"
    only = choice.function.name if isinstance(choice, NamedChoice) else None
    tools = [tool.function for tool in body.tools if only in (None, tool.function.name)]
    plan.offered = {tool.name: tool.parameters or {} for tool in tools}
    if choice != "auto":
        plan.calls = JSON_CALLS
        one = only is not None or not body.parallel_tool_calls
        plan.grammar = {"json_schema": json.dumps(calls_schema(plan.offered, at_most_one=one))}
        return
    if parser is None:
        raise RequestError(
            "tool_choice auto needs to know how the model writes calls: start the server with --tool-call-parser.",
            param="tools",
        )
    plan.calls = parser


def _plan_strict(plan: ChatPlan, body: ChatBody) -> None:
    """With auto, arguments follow their schema if a tool is strict and no other grammar is asked for."""
    strict = any(tool.function.strict for tool in body.tools) and plan.calls not in (None, JSON_CALLS)
    if not strict or plan.calls is None or any(getattr(body, name) is not None for name in GRAMMAR_FIELDS):
        return
    tag = None if plan.show_control_tokens else strict_tag(plan.calls, plan.offered)
    plan.grammar = {} if tag is None else {"structural_tag": tag}
    plan.warning = NOT_ENFORCED if tag is None else plan.warning


def _show_marks(plan: ChatPlan, tokenizer: Tokenizer) -> None:
    """Where a mark is a control token, which text leaves out, it must be shown to the parser."""
    marks = [*TOOL_PARSERS[plan.calls].markers] if plan.calls is not None else []
    if plan.reasoning is not None:
        found = marks_of(plan.reasoning)
        marks += [found.start, found.end]
    special = {tokenizer.tokens[id] for id in getattr(tokenizer, "special_ids", ())}
    plan.show_control_tokens = any(token is not None and token in mark for mark in marks for token in special)


def offered_of(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Name -> schema of tools as a request has them. Raises RequestError."""
    offered: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{index}] must have a function with a name.", param="tools")
        schema = function.get("parameters")
        offered[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return offered
