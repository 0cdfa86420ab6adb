"""max_thinking_tokens over HTTP: the end mark is forced in whole, whoever opened the thinking, in streams and in whole replies.

The oracle goes on with its script at the position where it is, so what is said behind the mark begins that much later in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_chat import scripted_chat_folder
from server import Server, answer_of, events, running

START, END = "<think>", "</think>"
THOUGHT = "0123456789abcdefghijklmnopqrstuvwxyz"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["qwen3", "deepseek-r1"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server, and what its model says to open its thinking: nothing where the template has done it."""
    folder = scripted_chat_folder(tmp_path_factory.mktemp("chat"))
    with running(folder, tmp_path_factory.mktemp("s"), "--reasoning-parser", request.param) as server:
        yield server, START if request.param == "qwen3" else ""


def asked(server: Server, text: str, *, stream: bool, **fields: Any) -> tuple[str, str, int]:
    """(thinking, answer, tokens of the thinking) when the model would say this text."""
    body = {"model": "default", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 120, **fields}
    if not stream:
        reply = answer_of(server.http.post("/v1/chat/completions", json=body))
        message, usage = reply["choices"][0]["message"], reply["usage"]
        thinking, answer = message["reasoning_content"] or "", message["content"] or ""
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as lines:
            found = events(lines.iter_lines())
        deltas = [choice["delta"] for event in found for choice in event["choices"]]
        thinking = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        answer, usage = "".join(delta.get("content") or "" for delta in deltas), found[-1]["usage"]
        assert END not in thinking + answer
    return thinking, answer, usage["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 8])
def test_the_budget_ends_the_thinking(model: tuple[Server, str], budget: int, stream: bool) -> None:
    server, start = model
    thinking, answer, count = asked(server, start + THOUGHT, stream=stream, max_thinking_tokens=budget)
    assert thinking == THOUGHT[:budget]
    assert answer == THOUGHT[budget + len(END) :]
    assert count == len(start) + budget + len(END)


@pytest.mark.parametrize("stream", [False, True])
def test_who_keeps_to_the_budget_is_left_alone(model: tuple[Server, str], stream: bool) -> None:
    server, start = model
    said = start + "short" + END + "answer"
    expected = ("short", "answer", len(start + "short" + END))
    assert asked(server, said, stream=stream, max_thinking_tokens=20) == expected
    assert asked(server, said, stream=stream) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_mark_that_has_begun_is_completed(model: tuple[Server, str], stream: bool) -> None:
    """The budget runs out within the mark that the model itself was about to say: it is not said twice."""
    server, start = model
    said = start + "abc" + END + "rest"
    assert asked(server, said, stream=stream, max_thinking_tokens=3 + 4) == ("abc", "rest", len(start + "abc" + END))


@pytest.mark.parametrize("stream", [False, True])
def test_the_grammar_begins_behind_the_forced_mark(model: tuple[Server, str], stream: bool) -> None:
    server, start = model
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
    thinking, answer, count = asked(server, start + THOUGHT, stream=stream, max_thinking_tokens=5, response_format=form)
    assert (thinking, count) == (THOUGHT[:5], len(start) + 5 + len(END))
    assert json.loads(answer)["n"] <= 99


def test_many_at_once_keep_their_own_budgets(model: tuple[Server, str]) -> None:
    server, start = model
    body = {"messages": [{"role": "user", "content": start + THOUGHT}], "temperature": 0, "max_tokens": 120, "n": 3}
    reply = answer_of(server.http.post("/v1/chat/completions", json={**body, "max_thinking_tokens": 4}))
    assert [choice["message"]["reasoning_content"] for choice in reply["choices"]] == [THOUGHT[:4]] * 3


@pytest.mark.parametrize("budget", [-1, "x", 1.5])
def test_what_is_no_budget_is_refused(model: tuple[Server, str], budget: Any) -> None:
    server, _ = model
    body = {"messages": [{"role": "user", "content": "x"}], "max_thinking_tokens": budget}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "max_thinking_tokens" in reply.text
