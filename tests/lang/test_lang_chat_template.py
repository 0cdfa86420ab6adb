"""Templates as glue: a program's text equals what the template renders for the same conversation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedBackend

import banyan as bn
from banyan.lang.chat_template import (
    TEMPLATES,
    ChatTemplate,
    RenderedTemplate,
    TemplateError,
    get_chat_template,
    get_chat_template_by_model_path,
)
from banyan.lang.transcript import Transcript
from banyan.managers.chat_template import ChatTemplate as Renderer
from banyan.managers.errors import RequestError

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are SmolLM"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first = messages[0]['content'] + '\n\n' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for message in rest -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{%- endif -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}{{ raise_exception('no system') }}{% endif %}"
    "{% endfor %}"
)
QWEN3 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' and loop.last %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def renderer(source: str) -> Renderer:
    return Renderer(source, "<s>", "</s>")


def glue(source: str) -> RenderedTemplate:
    compiled = renderer(source)

    def render(messages: list[dict[str, str]], generate: bool) -> str:
        try:
            return compiled.render(messages, add_generation_prompt=generate)
        except RequestError as error:
            raise TemplateError(str(error)) from None

    return RenderedTemplate(render)


def spoken(template: ChatTemplate, messages: list[dict[str, str]]) -> str:
    transcript = Transcript(lambda: template)
    for message in messages:
        transcript.begin(message["role"])  # type: ignore[arg-type]
        transcript.append(message["content"])
        transcript.end(message["role"])  # type: ignore[arg-type]
    return transcript.text


@given(
    source=st.sampled_from([SMOLLM, GEMMA]),
    system=st.booleans(),
    contents=st.lists(st.text("abc<>é", min_size=1, max_size=8), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_a_conversation_reads_as_the_template_writes_it(source: str, system: bool, contents: list[str]) -> None:
    roles = ["user" if index % 2 == 0 else "assistant" for index in range(len(contents))]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    if system:
        messages.insert(0, {"role": "system", "content": "S"})
    assert spoken(glue(source), messages) == renderer(source).render(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("source", "stops", "generation"),
    [
        (SMOLLM, ("<|im_end|>",), "<|im_start|>assistant\n"),
        (GEMMA, ("<end_of_turn>",), "<start_of_turn>model\n"),
        (MISTRAL, ("</s>",), ""),
        (QWEN3, ("<|im_end|>",), "<|im_start|>assistant\n"),
    ],
)
def test_an_assistant_s_turn_begins_as_a_generation_does(source: str, stops: tuple[str, ...], generation: str) -> None:
    template = glue(source)
    assert template.stop_strings == stops
    assert template.begin("user", "assistant") == generation
    head = renderer(source).render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert template.begin(None, "user") + "hi" + template.end("user") + template.begin("user", "assistant") == head


def test_an_order_that_the_template_refuses_is_an_error() -> None:
    with pytest.raises(TemplateError, match="must alternate"):
        glue(GEMMA).begin("user", "user")
    with pytest.raises(TemplateError, match="no system"):
        glue(MISTRAL).begin(None, "system")
    with pytest.raises(TemplateError, match="does not show"):
        RenderedTemplate(lambda messages, generate: "nothing").begin(None, "user")


def test_each_glue_is_rendered_once() -> None:
    calls: list[int] = []

    def render(messages: list[dict[str, str]], generate: bool) -> str:
        calls.append(1)
        return renderer(SMOLLM).render(messages, add_generation_prompt=generate)

    template = RenderedTemplate(render)
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 3
    spoken(template, conversation)
    num_calls = len(calls)
    spoken(template, conversation)
    assert len(calls) == num_calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_tables(name: str) -> None:
    @bn.function
    def program(s: object) -> None:
        s += bn.system("SYS") + bn.user("USR") + bn.assistant(bn.gen("x"))  # type: ignore[operator]

    state = program.run(backend=ScriptedBackend(lambda *_: "ANS", template=name))
    text = state.text()
    assert 0 <= text.index("SYS") < text.index("USR") < text.index("ANS")
    assert [message["content"] for message in state.messages()] == ["SYS", "USR", "ANS"]


def test_llama_2_puts_the_system_into_the_first_user_turn() -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    assert (
        spoken(get_chat_template("llama-2-chat"), messages) == "[INST] <<SYS>>\ns\n<</SYS>>\n\nu [/INST]a </s><s>[INST] u [/INST]"
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-instruct"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen"),
        ("Qwen/Qwen2-VL-7B", "qwen2-vl"),
        ("google/gemma-2-2b-it", "gemma-it"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3-Base", None),
        ("TinyLlama/TinyLlama-1.1B-Chat", "chatml"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistral"),
        ("gpt2", None),
    ],
)
def test_guesses(path: str, name: str | None) -> None:
    assert get_chat_template_by_model_path(path) is (None if name is None else TEMPLATES[name])
