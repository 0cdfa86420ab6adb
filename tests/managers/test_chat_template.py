from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level_folder

from banyan.managers import chat_template
from banyan.managers.chat_template import RESERVED_KWARGS, ChatTemplate
from banyan.managers.errors import RequestError, StartError
from banyan.managers.tokenizer import Tokenizer

SIMPLE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '</>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PARTS = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render([USER] if messages is None else messages, **kwargs)


def refused(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as info:
        render(source, messages, **kwargs)
    assert info.value.status_code == 400
    return info.value


# --- contents ---------------------------------------------------------------------------------------------------------------------


def test_a_plain_conversation() -> None:
    assert render(SIMPLE) == "<user>hi</><assistant>"
    assert render(SIMPLE, add_generation_prompt=False) == "<user>hi</>"


@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "ab"}], ({"type": "text", "text": "ab"},)])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_render_as_the_string_does(content: Any, role: str) -> None:
    assert render(SIMPLE, [{"role": role, "content": content}]) == f"<{role}>ab</><assistant>"


def test_several_parts_are_joined_or_handed_over_as_the_template_wants() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(SIMPLE, [{"role": "user", "content": parts}], add_generation_prompt=False) == "<user>a b</>"
    assert render(PARTS, [{"role": "user", "content": parts}]) == "<s>user:[a][b]</s>"
    assert render(PARTS) == "<s>user:hi</s>"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% set content = m.content %}{% for p in content %}({{ p.text }}){% endfor %}{% endfor %}",
        "{% macro show(content) %}{% for p in content %}({{ p.text }}){% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m['content']) }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content | list %}({{ p.text }}){% endfor %}{% endfor %}",
    ],
)
def test_loops_over_a_content_are_found_behind_names(source: str) -> None:
    assert render(source, [{"role": "user", "content": [{"type": "text", "text": "a"}]}]) == "(a)"


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_null_content_is_the_empty_string(message: dict[str, Any]) -> None:
    assert render(SIMPLE, [message], add_generation_prompt=False) == "<assistant></>"


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[1].content[0]"),
        ([{"type": "text", "text": "a"}, {"type": "text"}], "messages[1].content[1]"),
        ([{"text": "a"}], "messages[1].content[0]"),
        ([3], "messages[1].content[0]"),
        ({"type": "text", "text": "a"}, "messages[1].content"),
        (7, "messages[1].content"),
    ],
)
def test_other_contents_are_refused_by_name(content: Any, where: str) -> None:
    error = refused(SIMPLE, [USER, {"role": "user", "content": content}])
    assert error.param == where
    assert where in error.message


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    render(PARTS, messages, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]


# --- continuing the last message --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["The answer is ", "", [{"type": "text", "text": "The "}, {"type": "text", "text": "x"}], [], None]
)
@pytest.mark.parametrize("source", [SIMPLE, PARTS])
def test_the_prompt_ends_inside_the_last_message(source: str, content: Any) -> None:
    last = {"role": "assistant", "content": content}
    prompt = render(source, [USER, last], continue_final_message=True)
    closed = render(source, [USER, last], add_generation_prompt=False)
    assert closed.startswith(prompt.removesuffix(" "))
    assert "continue-final" not in prompt
    if content == "The answer is ":
        assert prompt.endswith("The answer is ")


def test_a_last_message_that_cannot_be_continued_is_refused() -> None:
    assert refused(SIMPLE, [USER], continue_final_message=True).param == "continue_final_message"
    assert refused(SIMPLE, [], continue_final_message=True).param == "continue_final_message"
    hidden = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert (
        "cannot be continued" in refused(hidden, [USER, {"role": "assistant", "content": "x"}], continue_final_message=True).message
    )


# --- what templates expect of Hugging Face's environment --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'a': '<é>', 'b': [1]} | tojson }}", '{"a": "<é>", "b": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),
        ("{{ bos_token ~ 1 ~ eos_token }}", "<s>1</s>"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}", "abab"),
        (
            "{% for c in [[1, [2]], [3]] recursive %}{% if c is iterable %}{{ loop(c) }}{% else %}{{ c }}{% endif %}{% endfor %}",
            "123",
        ),
        ("{% for m in messages %}{{ loop.length }}{{ loop.last }}{% else %}none{% endfor %}", "1True"),
        ("{{ 'x' * 3 + 'y' }}{{ 2 * 3 }}{{ [1] + [2] }}{{ 'a=%s' % 4 }}", "xxxy6[1, 2]a=4"),
        ("{{ none }}|{{ undefined_name }}|{{ tools }}", "None||None"),
        ("{{ thinking }}", "yes"),
    ],
)
def test_conventions(source: str, text: str) -> None:
    assert render(source, thinking="yes") == text


def test_a_template_for_tools_is_used_when_there_are_tools() -> None:
    template = ChatTemplate("plain", None, None, tool_source="{{ tools[0].name }}")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=[{"name": "f"}]) == "f"


# --- failures ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0]['content'].foo.bar }}", "foo"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_whatever_a_template_raises_is_a_400_with_its_message(source: str, message: str) -> None:
    assert message in refused(source).message


@pytest.mark.parametrize("source", ["{% for %}", "{% if x %}", "{{ 'a' | nofilter }}", "{% endgeneration %}"])
def test_a_source_that_is_no_template_stops_the_start(source: str) -> None:
    with pytest.raises(StartError, match="does not compile"):
        ChatTemplate(source, None, None)


def test_a_base_model_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="--chat-template") as info:
        ChatTemplate(None, "<s>", "</s>").render([USER])
    assert info.value.status_code == 400


@pytest.mark.parametrize(
    "name",
    [*sorted(RESERVED_KWARGS - {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}), "_x", "a b"],
)
def test_reserved_variables_are_refused(name: str) -> None:
    assert refused(SIMPLE, **{name: 1}).param == "chat_template_kwargs"


# --- hostile templates ------------------------------------------------------------------------------------------------------------

ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops without a body": "{% for i in range(99999) %}{% for j in range(999) if j < 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for i in [60] recursive %}{% if i %}{{ loop([i - 1, i - 1]) }}{% endif %}{% endfor %}",
    "call block": "{% macro f() %}{% for i in range(9999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}{% call f() %}{% endcall %}{% endcall %}",
}
HUGE = {
    "range": "{{ range(10000000) | list }}",
    "doubling +": "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling ~": "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "product": "{{ 'x' * 10000000000 }}",
    "product of a list": "{{ 10000000000 * [1] }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "squares": "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "output": "{% set s = 'x' * 1000000 %}{% for i in range(90) %}{{ s }}{% endfor %}",
    "output of a macro": "{% macro f() %}{% for i in range(9999) %}{{ 'x' * 1000000 }}{% endfor %}{% endmacro %}{{ f() }}",
    "output of a set block": "{% set s = 'x' * 1000000 %}{% set t %}{% for i in range(9999) %}{{ s }}{% endfor %}{% endset %}",
}
ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "filter": "{{ ''|attr('__class__') }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "lipsum": "{{ lipsum.__globals__['os'] }}",
    "mutation": "{{ messages.append(1) }}",
    "limits": "{% set environment = 1 %}{{ self.environment }}{{ joiner.__init__.__globals__ }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_cannot_run_for_ever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 200)
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1e9)
    assert "too many steps" in refused(source).message


def test_a_template_cannot_run_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", -1.0)
    assert "too many steps" in refused(SIMPLE).message


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE.keys())
def test_a_template_cannot_fill_the_memory(source: str) -> None:
    refused(source)


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    """An unsafe attribute is undefined: it shows nothing, and any use of it is refused."""
    with contextlib.suppress(RequestError):
        assert render(source) == ""
    refused(source.replace("}}", "|list|first + 1 }}"))


def test_a_rendering_leaves_no_budget_behind() -> None:
    template = ChatTemplate(SIMPLE, None, None)
    first = template.render([USER] * 50)
    assert all(template.render([USER] * 50) == first for _ in range(20))


# --- where templates come from ----------------------------------------------------------------------------------------------------


def test_template_of_a_tokenizer_and_of_a_file(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "model", chat_template="{{ bos_token }}own")
    tokenizer = Tokenizer.load(str(folder))
    assert ChatTemplate.of(tokenizer).render([USER]) == "<s>own"
    (tmp_path / "other.jinja").write_text("other{{ eos_token }}")
    assert ChatTemplate.of(tokenizer, str(tmp_path / "other.jinja")).render([USER]) == "other</s>"
    with pytest.raises(StartError, match=r"missing\.jinja"):
        ChatTemplate.of(tokenizer, str(tmp_path / "missing.jinja"))
