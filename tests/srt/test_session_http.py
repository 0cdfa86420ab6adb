"""The routes of sessions, and session_params on every route that generates."""

from __future__ import annotations

from typing import Any

import pytest


def test_open_and_close(served: Any) -> None:
    client = served.client
    answer = client.post("/open_session", json={"capacity_of_str_len": 10, "session_id": "mine", "streaming": None})
    assert (answer.status_code, answer.json()) == (200, "mine")
    again = client.post("/open_session", json={"capacity_of_str_len": 10, "session_id": "mine"})
    assert again.status_code == 400
    assert "exists already" in again.text
    made_up = client.request("GET", "/open_session", json={"capacity_of_str_len": 10}).json()
    assert isinstance(made_up, str)
    for method, name in (("POST", "mine"), ("GET", made_up)):
        closed = client.request(method, "/close_session", json={"session_id": name})
        assert (closed.status_code, closed.content) == (200, b"")
        unknown = client.request(method, "/close_session", json={"session_id": name})
        assert unknown.status_code == 400
        assert f"session id {name} does not exist" in unknown.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/open_session", {}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": -1}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 1, "timeout": -1}, "timeout"),
        ("/close_session", {}, "session_id"),
        ("/close_session", {"session_id": 5}, "session_id"),
        ("/generate", {"text": "a", "session_params": 5}, "session_params"),
        ("/generate", {"text": "a", "session_params": {}}, "session_params"),
        ("/generate", {"text": "a", "session_params": {"id": 5}}, "session_params.id"),
        ("/generate", {"text": ["a"], "session_params": {"id": "s"}}, "session_params"),
        ("/generate", {"text": "a", "session_params": {"id": "s"}, "session_id": "s"}, "session_params"),
        ("/v1/completions", {"prompt": "a", "session_params": {"rid": "s"}}, "session_params"),
        ("/v1/completions", {"prompt": "a", "n": 2, "session_params": {"id": "s"}}, "session_params"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "session_params": {"id": 5}}, "session_params"),
    ],
)
def test_bad_bodies_name_the_field(served: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = served.client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_too_many(served: Any) -> None:
    for number in range(8):
        assert served.client.post("/open_session", json={"capacity_of_str_len": 1, "session_id": f"{number}"}).status_code == 200
    assert served.client.post("/open_session", json={"capacity_of_str_len": 1}).status_code == 429


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_params_reach_the_engine(served: Any, path: str, body: dict[str, Any]) -> None:
    params = {"id": "s", "rid": "r", "offset": -1, "replace": True, "drop_previous_output": None, "unknown": 1}
    assert served.client.post(path, json={**body, "session_params": params}).status_code == 200
    (found,) = [plan.session for plan in served.manager.plans]
    assert (found.id, found.rid, found.offset, found.replace, found.drop_previous_output) == ("s", "r", -1, True, None)
    assert served.client.post(path, json={**body, "session_id": "affinity"}).status_code == 200
    assert served.manager.plans[-1].session is None
