"""Control tokens in messages are text: what is encoded never has their ids, and reads as what was given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback_folder, byte_level_folder

from banyan.managers.plain_text import MARK, MessageMarker, PlainText, encode_marked, marker_of
from banyan.managers.tokenizer import Tokenizer

BITS = ["<s>", "</s>", "<|eot_id|>", "<", "s", ">", "|", "eot", " hi", "\n", "ö", "<|", "|>", "<<s>>", "</", "世"]


@pytest.fixture(scope="module", params=[byte_level_folder, byte_fallback_folder])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(str(request.param(tmp_path_factory.mktemp("t"))))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(BITS), max_size=10))
def test_no_control_token_comes_from_a_message(tokenizer: Tokenizer, bits: list[str]) -> None:
    text = "".join(bits)
    marked = PlainText(["<s>", "</s>", "<|eot_id|>"]).marked(text)
    assert marked.replace(MARK, "") == text
    ids = encode_marked(tokenizer, "a" + marked)
    assert not set(ids) & tokenizer.special_ids - {0}  # 0 is what byte fallback has for "unknown"
    if tokenizer.byte_table is not None:
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a" + text


def test_the_templates_own_tokens_stay(tokenizer: Tokenizer) -> None:
    marker = marker_of(tokenizer)
    content = marker.marked({"role": "user", "content": "x</s>y"})["content"]
    ids = encode_marked(tokenizer, f"<s>{content}</s>")
    special = [id for id in ids if tokenizer.tokens[id] in ("<s>", "</s>")]
    assert [tokenizer.tokens[id] for id in special] == ["<s>", "</s>"]
    assert marker_of(tokenizer) is marker


def test_text_without_control_tokens_is_encoded_as_ever(tokenizer: Tokenizer) -> None:
    text = "the quick <brown> fox"
    assert PlainText(["<s>"]).marked(text) is text
    assert encode_marked(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)


def test_every_string_of_a_message_is_marked_but_the_role() -> None:
    marker = MessageMarker(["<s>", "</think>"])
    message: dict[str, Any] = {
        "role": "tool<s>",
        "name": "<s>",
        "content": [{"type": "text", "text": "a<s>"}],
        "tool_calls": [{"function": {"name": "f", "arguments": {"k": "<s>", "<s>": 3}}}],
    }
    marked = marker.marked(message)

    assert marked["role"] == "tool<s>"
    assert marked["name"] == f"<{MARK}s>"
    assert marked["content"][0]["text"] == f"a<{MARK}s>"
    assert marked["tool_calls"][0]["function"]["arguments"] == {"k": f"<{MARK}s>", f"<{MARK}s>": 3}
    assert message["name"] == "<s>"


def test_a_template_finds_the_marks_of_thinking_in_what_the_assistant_said() -> None:
    marker = MessageMarker(["<s>", "</think>"])
    assert marker.marked({"role": "assistant", "content": "a</think><s>"})["content"] == f"a</think><{MARK}s>"
    assert marker.marked({"role": "user", "content": "</think>"})["content"] == f"<{MARK}/think>"


def test_thousands_of_control_tokens_cost_little() -> None:
    plain = PlainText([f"<unused{number}>" for number in range(6000)])
    assert plain.marked("<unused5999>") == f"<{MARK}unused5999>"
    assert plain.marked("<" * 1000) == "<" * 1000
