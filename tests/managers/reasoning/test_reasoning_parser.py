"""Thinking and answer apart: every kind of marks, cut at any place, in linear time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.reasoning.marks import REASONING_MARKS
from banyan.managers.reasoning.parser import ReasoningParser, marks_of, output_parser, split_reasoning
from banyan.managers.tool_parsers.events import Parsed, collected

TAGGED = sorted(set(REASONING_MARKS) - {"gpt-oss"})
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'


def parse(pieces: Any, *names: str | None, **options: Any) -> Parsed:
    parser = output_parser(*names, **options)
    return collected([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def cut(text: str, seed: int) -> list[str]:
    source = random.Random(seed)
    pieces = []
    while text:
        size = source.choice([1, 2, 3, 9])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("name", TAGGED)
def test_marks_split_anywhere(name: str) -> None:
    marks = marks_of(name)
    text = f"\n{marks.start}\nOne <b> two.\n\nThree\n{marks.end}\n\nThe answer.\n"
    for pieces in ([text], list(text), cut(text, 5)):
        found = parse(pieces, name)
        assert (found.reasoning, found.text) == ("One <b> two.\n\nThree", "The answer.\n")


@pytest.mark.parametrize("name", TAGGED)
def test_without_a_start_mark(name: str) -> None:
    marks = marks_of(name)
    text = f"thought{marks.end}answer"
    inside = parse(list(text), name)
    if marks.template_opens:
        assert (inside.reasoning, inside.text) == ("thought", "answer")
    else:
        assert (inside.reasoning, inside.text) == ("", text)
    found = parse(list(text), name, inside=True)
    assert (found.reasoning, found.text) == ("thought", "answer")
    assert parse(list("plain  "), name, inside=False) == Parsed(text="plain  ", calls=[])


def test_a_thought_without_an_end_has_no_answer() -> None:
    assert parse(list("<think>so </thin"), "qwen3") == Parsed(reasoning="so </thin", calls=[])
    assert parse([], "deepseek-r1") == Parsed(calls=[])


def test_a_call_ends_the_thinking() -> None:
    for pieces in (["think " + CALL], list("think " + CALL)):
        found = parse(pieces, "deepseek-r1", "hermes")
        assert (found.reasoning, found.text, found.calls[0].name) == ("think", "", "now")


def test_calls_in_thinking_that_ends_are_no_calls_of_the_answer() -> None:
    text = "<think>[TOOL] maybe now()</think>Fine. " + CALL
    found = parse(cut(text, 2), "qwen3", "qwen25", tools={"now": {}})
    assert (found.reasoning, found.text, found.calls[0].arguments) == ("[TOOL] maybe now()", "Fine.", '{"a": 1}')


def test_gpt_oss_reads_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Noon.<|return|>"
    )
    found = parse(list(text), "gpt-oss", "gpt-oss")
    assert (found.reasoning, found.text, len(found.calls)) == ("Hm.", "Noon.", 1)
    no_calls = parse(list(text), "gpt-oss")
    assert (no_calls.reasoning, no_calls.text, no_calls.calls) == ("Hm.", "{}\nNoon.", [])
    no_thinking = parse(list(text), None, "gpt-oss")
    assert (no_thinking.reasoning, no_thinking.text, len(no_thinking.calls)) == ("", "Hm.\nNoon.", 1)


@pytest.mark.parametrize("name", ["minimax-m3", "qwen3", "gemma4"])
def test_an_end_mark_at_the_beginning_is_a_thought_without_words(name: str) -> None:
    text = f"\n{marks_of(name).end}\n\nanswer"
    for pieces in ([text], list(text)):
        assert parse(pieces, name) == Parsed(text="answer", calls=[])


def test_kimi_k3_reads_blocks() -> None:
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Noon.<|close|>response<|sep|><|open|>tools<|sep|>"
    text += '<|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
    found = parse(list(text), "kimi_k3", "kimi_k3", inside=True)
    assert (found.reasoning, found.text, [call.arguments for call in found.calls]) == ("Hm.", "Noon.", ["{}"])
    plain = text.partition("<|open|>tools")[0] + "<|close|>message<|sep|>"
    assert parse(list(plain), "kimi_k3", inside=True) == Parsed(reasoning="Hm.", text="Noon.", calls=[])
    no_thinking = parse(list("Hi.<|close|>response<|sep|><|close|>message<|sep|>"), "kimi_k3", inside=False)
    assert no_thinking == Parsed(text="Hi.", calls=[])
    array = 'Hm.<|close|>think<|sep|>[{"name": "now", "parameters": {}}]'
    found = parse(list(array), "kimi_k3", "json", inside=True)
    assert (found.reasoning, found.text, found.calls[0].name) == ("Hm.", "", "now")


def test_neither_parser_changes_nothing() -> None:
    assert parse(["<think>a</think>", " b"]) == Parsed(text="<think>a</think> b", calls=[])


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        ("<think>a</think>b", "think", ("a", "b")),
        ("a</think>b", "qwen3", ("a", "b")),
        ("a</think>b", "deepseek-r1", ("a", "b")),
        ("  b", "qwen3", ("", "  b")),
        ("b", "deepseek-r1", ("b", "")),
        ("◁think▷a◁/think▷b", "kimi", ("a", "b")),
    ],
)
def test_whole_texts(text: str, name: str, wanted: tuple[str, str]) -> None:
    assert split_reasoning(text, name) == wanted


BITS = [
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    "<|open|>response<|sep|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "now"}',
    *"<>/ \nax",
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["deepseek-r1", "qwen3", "kimi", "kimi_k3"]),
    st.sampled_from([None, "hermes", "glm45"]),
    st.lists(st.sampled_from(BITS), max_size=20),
    st.integers(0, 1 << 30),
)
def test_any_chunking_is_the_whole(name: str, calls: str | None, bits: list[str], seed: int) -> None:
    text = "".join(bits)
    whole = parse([text], name, calls)
    assert parse(list(text), name, calls) == whole
    assert parse(cut(text, seed), name, calls) == whole


@pytest.mark.parametrize("text", ["<" * 100_000, "</think" * 15_000, " " * 100_000, "<think>" + " \n" * 50_000, "a </" * 25_000])
def test_hostile_text_costs_linear_work(text: str) -> None:
    for size in (len(text), 16, 1):
        parser = ReasoningParser(marks_of("qwen3"), inside=True)
        for start in range(0, len(text), size):
            parser.feed(text[start : start + size])
        parser.finish()
        assert parser.num_looked <= 12 * len(text)
