"""Headers and routes of limits and lifecycle, over a real uvicorn and a manager whose answers are a script."""

from __future__ import annotations

from typing import Any

import pytest

from banyan.managers.deadlines import OWN, QUEUE, REASONS
from banyan.managers.io_struct import ControlReply
from banyan.managers.request_gate import DISPLACED, QUEUE_FULL

ROUTES = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, ROUTES[request.param]


@pytest.mark.parametrize("stream", [False, True])
def test_service_fields_arrive_from_body_and_headers(served: Any, route: Any, stream: bool) -> None:
    path, body = route
    given = {**body, "stream": stream, "priority": -3, "routing_key": "mine", "timeout": 5}
    assert served.client.post(path, json=given).status_code == 200
    headers = {"X-Request-Timeout": "2.5", "X-SMG-Routing-Key": "gateway's"}
    assert served.client.post(path, json=given, headers=headers).status_code == 200
    assert served.client.post(path, json={**body, "stream": stream}, headers={"X-Request-Timeout": "1e3"}).status_code == 200
    assert served.client.post(path, json={**body, "stream": stream}).status_code == 200
    assert [(message.priority, message.routing_key, message.timeout) for message in served.manager.seen] == [
        (-3, "mine", 5.0),
        (-3, "gateway's", 2.5),
        (None, "", 1000.0),
        (None, "", None),
    ]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "", "1s"])
def test_a_bad_deadline_header_is_400(served: Any, route: Any, text: str) -> None:
    path, body = route
    reply = served.client.post(path, json={**body, "stream": True}, headers={"X-Request-Timeout": text})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "X-Request-Timeout"
    assert served.manager.seen == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout", 0), ("timeout", -2.5), ("timeout", "5"), ("priority", 1 << 40), ("priority", 1.5), ("routing_key", 3)],
)
def test_bad_fields_are_400(served: Any, route: Any, field: str, value: Any) -> None:
    path, body = route
    reply = served.client.post(path, json={**body, field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", [QUEUE_FULL, DISPLACED, REASONS[QUEUE], REASONS[OWN]], ids=lambda reason: reason.message)
def test_a_refusal_before_the_first_token_is_an_http_error(served: Any, route: Any, stream: bool, reason: Any) -> None:
    path, body = route
    served.manager.script, served.manager.end = [], reason
    reply = served.client.post(path, json={**body, "stream": stream})
    assert reply.status_code == reason.status_code
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers.get("retry-after") == ("1" if reason.status_code == 503 else None)
    assert reply.json()["error"]["message"] == reason.message


def test_later_the_stream_tells_it(served: Any) -> None:
    served.manager.end = REASONS[OWN]
    reply = served.client.post("/generate", json={"text": "a", "stream": True})
    assert reply.status_code == 200
    assert reply.text.count('"status_code":504') == 1
    assert reply.text.endswith("data: [DONE]\n\n")


def test_overload_does_not_make_the_probe_fail(served: Any) -> None:
    served.manager.script, served.manager.end = [], QUEUE_FULL
    assert served.client.get("/health_generate").status_code == 200
    served.manager.end = REASONS[QUEUE]
    assert served.client.get("/health_generate").status_code == 503


def test_pause_and_continue(served: Any) -> None:
    calls: list[str] = []

    async def pause(mode: str) -> ControlReply:
        calls.append(mode)
        return ControlReply(call_id=1, success=mode != "in_place", message=f"said {mode}")

    async def resume() -> ControlReply:
        calls.append("continue")
        return ControlReply(call_id=2, message="on")

    served.manager.pause_generation, served.manager.continue_generation = pause, resume
    for body in ({}, {"mode": None}, {"mode": "abort"}, {"mode": "retract", "other": 1}):
        reply = served.client.post("/pause_generation", json=body)
        assert (reply.status_code, reply.json()["status"]) == (200, "ok")
    failed = served.client.post("/pause_generation", json={"mode": "in_place"})
    assert (failed.status_code, failed.json()["error"]["message"]) == (409, "said in_place")
    for mode in ("sleep", 3, ["abort"]):
        refused = served.client.post("/pause_generation", json={"mode": mode})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mode")
    reply = served.client.post("/continue_generation", json={"torch_empty_cache": True})
    assert reply.json() == {"message": "on", "status": "ok"}
    assert calls == ["abort"] * 3 + ["retract", "in_place", "continue"]


@pytest.mark.parametrize("path", ROUTES)
def test_overload_is_answered_before_the_body_is_read(served: Any, path: str) -> None:
    served.manager.is_full = True
    reply = served.client.post(path, content=b"{no json")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["message"] == "The request queue is full."
    assert served.client.get("/health").status_code == 200
    served.manager.is_full = False
    assert served.client.post(path, content=b"{no json", headers={"content-type": "application/json"}).status_code == 400
