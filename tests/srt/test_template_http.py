"""POST /apply-template: a conversation as text that /generate takes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "<assistant>"),
        ({"add_generation_prompt": False}, ""),
        ({"add_generation_prompt": None}, "<assistant>"),
    ],
)
def test_the_conversation_is_rendered(served: Any, more: dict[str, Any], end: str) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "USER", "content": [{"type": "text", "text": "U"}]}]
    reply = served.client.post("/apply-template", json={"messages": messages, "model": "ignored", **more})
    assert reply.json() == {"prompt": "<system>S<user>U" + end}


def test_any_name_may_be_a_variable(served: Any) -> None:
    body = {"messages": [{"role": "user", "content": "U"}], "chat_template_kwargs": {"template": 1, "func": 2, "options": 3}}
    assert served.client.post("/apply-template", json=body).json() == {"prompt": "<user>U<assistant>"}


def test_an_assistant_s_message_may_be_left_open(served: Any) -> None:
    body = {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}], "continue_final_message": True}
    assert served.client.post("/apply-template", json=body).json() == {"prompt": "<user>U<assistant>A"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "U"}], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "U"}], "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_rendered_is_a_400_that_names_the_field(served: Any, body: dict[str, Any], param: str) -> None:
    reply = served.client.post("/apply-template", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param)


def test_a_model_without_a_template(served: Any) -> None:
    template, served.state.chat_template = served.state.chat_template, None
    try:
        reply = served.client.post("/apply-template", json={"messages": [{"role": "user", "content": "U"}]})
    finally:
        served.state.chat_template = template
    assert reply.status_code == 400
    assert "no chat template" in reply.json()["error"]["message"]
