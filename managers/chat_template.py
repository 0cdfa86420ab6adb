"""Chat templates: messages to the text of a prompt, in a sandbox.

The conventions are those of Hugging Face's templates: trimmed blocks, ``raise_exception``, ``strftime_now``, ``tojson`` without
HTML escapes, break and continue, and ``{% generation %}`` blocks that mean nothing here.

A template is foreign code. It sees no object but its inputs, and it cannot run for ever: each turn of a loop and each call of a
macro is a step, and a rendering has MAX_STEPS of them, MAX_SECONDS of time (looked at in each step) and MAX_OUTPUT characters;
``range`` ends at 100,000, and sums, products and joins that are larger than the output may be are refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .errors import RequestError, StartError
from .template_shape import TemplateShape, shape_of
from .tokenizer import DEFAULT_TEMPLATE, TOOL_TEMPLATE, Tokenizer
from .tool_parsers.json_text import loads

MAX_STEPS = 200_000
MAX_SECONDS = 10.0
MAX_OUTPUT = 32 << 20  # characters that variables and macros may write
MAX_INT_BITS = 1 << 12  # of a product
CONTINUE_MARK = "\u241econtinue-final-message\u241e"
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "conversation",
        "eos_token",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_dict",
        "return_tensors",
        "self",
        "strftime_now",
        "tokenize",
        "tokenizer",
        "tools",
        "truncation",
    }
)


class ChatTemplate:
    """A compiled template. Safe to render from several threads.

    source: None for a model without one; then every rendering is refused. tool_source: used instead when a request brings tools.
    Raises StartError if a source is not a template.
    """

    def __init__(
        self,
        source: str | None,
        bos_token: str | None,
        eos_token: str | None,
        *,
        tool_source: str | None = None,
    ) -> None:
        self._template = None if source is None else _Compiled(source)
        self._tool_template = None if tool_source is None else _Compiled(tool_source)
        self._source = f"{source or ''}{tool_source or ''}"
        self._special_tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    @classmethod
    def of(cls, tokenizer: Tokenizer, path: str | None = None) -> ChatTemplate:
        """The tokenizer's own template, or the one in the file ``path``. Raises StartError."""
        if path is None:
            templates = tokenizer.chat_templates
            sources = templates.get(DEFAULT_TEMPLATE), templates.get(TOOL_TEMPLATE)
            return cls(sources[0], tokenizer.bos_token, tokenizer.eos_token, tool_source=sources[1])
        try:
            with open(path, encoding="utf-8") as file:
                source = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"chat template {path}: {error}") from None
        return cls(source, tokenizer.bos_token, tokenizer.eos_token)

    def shows_tools(self) -> bool:
        """Whether the tools of a request reach the prompt."""
        return self._tool_template is not None or (self._template is not None and self._template.shape.has_tools)

    def sources(self) -> str:
        """The text of all templates, to tell formats from."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt. The text already holds BOS where the template writes it: encode it without special tokens.

        A content may be a string, None (the empty string) or a list of text parts, which are joined with spaces unless the template
        loops over parts itself. With continue_final_message the prompt ends inside the last message, which must be the assistant's.
        variables: a request's chat_template_kwargs, none of RESERVED_KWARGS among them.
        Raises RequestError, also with whatever the template raises.
        """
        compiled = self._tool_template if tools and self._tool_template is not None else self._template
        if compiled is None:
            raise RequestError("This model has no chat template; give the server one with --chat-template.", param="messages")
        _check_variables(variables)
        plain = [_plain_message(message, rank, compiled.shape) for rank, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(plain)
        text = compiled.render(
            {
                **self._special_tokens,
                **variables,
                "messages": plain,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }
        )
        if not continue_final_message:
            return text
        head, mark, _ = text.rpartition(CONTINUE_MARK)
        if not mark:
            raise RequestError("The chat template does not show the final message, so it cannot be continued.", param="messages")
        return head


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in RESERVED_KWARGS or name.startswith("_") or not name.isidentifier():
            raise RequestError(f"chat_template_kwargs: `{name}` is reserved.", param="chat_template_kwargs")


def _plain_message(message: Mapping[str, Any], rank: int, shape: TemplateShape) -> dict[str, Any]:
    """The message with a role, a content and calls that the template can show."""
    content = message.get("content")
    where = f"messages[{rank}].content"
    if content is None or content == []:
        content = ""
    elif isinstance(content, (list, tuple)):
        texts = [_part_text(part, f"{where}[{index}]") for index, part in enumerate(content)]
        content = [{"type": "text", "text": text} for text in texts] if shape.wants_parts else " ".join(texts)
    elif not isinstance(content, str):
        raise RequestError(f"{where} must be a string, null or a list of parts.", param=where)
    plain = {**message, "content": content}
    if message.get("role") == "developer" and not shape.knows_developer:
        plain["role"] = "system"
    if isinstance(message.get("tool_calls"), (list, tuple)):
        plain["tool_calls"] = [
            _plain_call(call, f"messages[{rank}].tool_calls[{index}]", as_text=shape.wants_argument_text)
            for index, call in enumerate(message["tool_calls"])
        ]
    return plain


def _plain_call(call: Any, where: str, *, as_text: bool) -> dict[str, Any]:
    """A call whose arguments are an object, or JSON text if the template wants that."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with a function that has a name.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not as_text:
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except ValueError:
            arguments = str(arguments)  # what a model wrote need not be JSON
    elif arguments is not None and not isinstance(arguments, (str, Mapping)):
        raise RequestError(f"{where}.function.arguments must be JSON text or an object.", param=where)
    elif as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(f"{where}: a part of type {kind!r} is not supported, only text is.", param=where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}: a text part needs a string `text`.", param=where)
    return str(part["text"])


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Put the mark behind the content of the last message."""
    if not messages or messages[-1].get("role") != "assistant":
        raise RequestError("continue_final_message needs a last message of the role assistant.", param="continue_final_message")
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + CONTINUE_MARK
    else:
        content[-1]["text"] += CONTINUE_MARK


class _Compiled:
    """A template's code and what was found in its source."""

    def __init__(self, source: str) -> None:
        try:
            self.shape = shape_of(_ENVIRONMENT.parse(source))
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise StartError(f"the chat template does not compile: {error}") from None

    def render(self, variables: dict[str, Any]) -> str:
        token = _BUDGET.set(_Budget())
        try:
            return self._template.render(variables)
        except Exception as error:  # foreign code may raise anything
            raise RequestError(f"The chat template refused the messages: {_message_of(error)}", param="messages") from None
        finally:
            _BUDGET.reset(token)


def _message_of(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


# --- limits -----------------------------------------------------------------------------------------------------------------------


class _Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_chars = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS or time.monotonic() > self._deadline:
            raise jinja2.TemplateRuntimeError("the template takes too many steps")

    def write(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if self._num_chars > MAX_OUTPUT:
            raise jinja2.TemplateRuntimeError(f"the template writes more than {MAX_OUTPUT} characters")


_BUDGET: ContextVar[_Budget] = ContextVar("chat_template_budget")


def _counted(value: Any) -> Any:
    """Sees each value on its way to the output, that of macros and blocks too."""
    if isinstance(value, str):
        _BUDGET.get().write(len(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT:
        raise jinja2.TemplateRuntimeError(f"the template builds a value of more than {MAX_OUTPUT} elements")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _product_size(left: Any, right: Any) -> int:
    """Elements of a repeated sequence, bits of a product of integers."""
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) * (MAX_OUTPUT // MAX_INT_BITS)
    count, sequence = (left, right) if isinstance(left, int) else (right, left)
    return _size(sequence) * count if isinstance(count, int) else 0


class _Limits(NodeTransformer):
    """Compiles the limits into a template. What it calls are attributes of the environment, which a template cannot rebind."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join_limited"), node.nodes, [], None, None, lineno=node.lineno)

    def _with_tick(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with limits on loops, macros and operators."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limits().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*":
            _check_size(_product_size(left, right))
        else:
            raise jinja2.TemplateRuntimeError(f"the operator {operator} is not available in chat templates")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def tick() -> None:
        _BUDGET.get().tick()

    @staticmethod
    def join_limited(*values: Any) -> str:
        """The operator ``~``."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what an assistant wrote, for training; its body is shown as it is."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads the class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation], finalize=_counted
    )
    environment.filters["tojson"] = _tojson
    environment.globals.pop("lipsum")
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _make_environment()
