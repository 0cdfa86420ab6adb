"""What a template expects is read from its source, and messages are given to it in that form."""

from __future__ import annotations

from typing import Any

import pytest

from banyan.managers.chat_template import ChatTemplate
from banyan.managers.errors import RequestError

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "ö"}'}}
LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"


def render(source: str, call: Any = CALL, **fields: Any) -> str:
    return ChatTemplate(source, None, None).render([{"role": "assistant", "content": None, "tool_calls": [call], **fields}])


@pytest.mark.parametrize(
    "body",
    [
        "{{ c.function.arguments | tojson }}",
        "{% set f = c.function %}{{ f['arguments'] | tojson }}",
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}",
        "{{ c['function']['arguments'] }}",
        "{{ 'x' + c.function.arguments }}",
        "{{ 'x' ~ c.function.arguments }}",
        "{% for k, v in c.function.arguments | items %}{{ '{\"' + k + '\": \"' + v + '\"}' }}{% endfor %}",
        "{% for k, v in c.function.arguments.items() %}{{ '{\"' + k + '\": \"' + v + '\"}' }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": "ö"}', {"a": "ö"}])
def test_arguments_come_as_the_template_wants_them(body: str, arguments: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    assert render(LOOP + body + END, call).removeprefix("x") == '{"a": "ö"}'


def test_arguments_that_are_no_json_and_none_at_all() -> None:
    source = LOOP + "{{ c.function.arguments | tojson }}" + END
    assert render(source, {"function": {"name": "f", "arguments": "{oops"}}) == '"{oops"'
    assert render(source, {"function": {"name": "f", "arguments": ""}}) == "{}"
    assert render(source, {"function": {"name": "f"}}) == "{}"


@pytest.mark.parametrize(
    "call", ["f", {}, {"function": {}}, {"function": {"name": 3}}, {"function": {"name": "f", "arguments": 3}}]
)
def test_broken_calls_are_refused_by_name(call: Any) -> None:
    with pytest.raises(RequestError) as info:
        render(LOOP + END, call)
    assert info.value.param == "messages[0].tool_calls[0]"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", None, None).render(message) == "system"
    knows = "{% if messages[0].role == 'developer' %}d{% else %}s{% endif %}"
    assert ChatTemplate(knows, None, None).render(message) == "d"


@pytest.mark.parametrize(
    ("source", "tool_source", "shown"),
    [("{{ tools }}", None, True), ("{{ messages }}", None, False), ("x", "{{ tools }}", True), (None, None, False)],
)
def test_whether_tools_are_shown(source: str | None, tool_source: str | None, shown: bool) -> None:
    assert ChatTemplate(source, None, None, tool_source=tool_source).shows_tools() is shown


def test_templates_that_refuse_say_why() -> None:
    with pytest.raises(RequestError, match="System role not supported") as info:
        render("{{ raise_exception('System role not supported') }}")
    assert (info.value.status_code, info.value.param) == (400, "messages")
