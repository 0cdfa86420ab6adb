"""Every route has a class, and every class holds for every route."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import banyan
from banyan.srt import auth, head_limit
from banyan.srt.auth import Door
from banyan.srt.http_server import create_app
from banyan.srt.routes import ROUTES, Access, access_of
from banyan.srt.server_args import ServerArgs
from banyan.srt.server_state import ServerState

KEY, ADMIN_KEY = "key-1", "key-2"


def routes_of(app: Any) -> set[str]:
    """Paths of all routes, whatever they were added with."""
    found: set[str] = set()
    for route in app.routes:
        inner = getattr(route, "original_router", None) or getattr(route, "app", None)
        found |= {route.path} if hasattr(route, "path") else routes_of(inner)
    return found


def test_the_table_has_every_route_and_no_other() -> None:
    assert routes_of(create_app(ServerState(ServerArgs.from_kwargs({"enable_metrics": True})))) == set(ROUTES)


def test_routes_that_change_the_server_want_the_admin_key() -> None:
    words = re.compile(r"cache|weight|memory|profile|pause|continue|abort|adapter|configure|trace|freeze|internal|drain|dump")
    public = {path for path, access in ROUTES.items() if access is Access.PUBLIC}
    assert {path for path in ROUTES if words.search(path)} == {path for path, access in ROUTES.items() if access is Access.ADMIN}
    assert public <= {"/health", "/health_generate", "/livez", "/readyz", "/startupz", "/metrics"}
    assert access_of("/no/such/path") is Access.API


def test_keys_are_compared_in_constant_time() -> None:
    for path in (Path(banyan.__file__).parent / "srt").rglob("*.py"):
        assert not re.search(r"[!=]=\s*(self\.)?_?(admin_)?api_key|(admin_)?api_key\s*[!=]=", path.read_text()), path


@pytest.fixture(scope="module")
def locked(make_served: Any) -> Iterator[Any]:
    server = make_served({"api_key": KEY, "admin_api_key": ADMIN_KEY})
    yield server
    server.close()


@pytest.fixture(scope="module")
def one_key(make_served: Any) -> Iterator[Any]:
    server = make_served({"api_key": KEY})
    yield server
    server.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def statuses(server: Any, path: str, headers: dict[str, str]) -> set[int]:
    concrete = path.replace("{name:path}", "small")
    return {server.client.request(method, concrete, headers=headers).status_code for method in ("GET", "POST", "PUT", "DELETE")}


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_each_route_of_a_server_with_both_keys(locked: Any, path: str) -> None:
    access = access_of(path) if "{" not in path else ROUTES[path]
    unopened, forbidden = {401}, {403}
    for headers in ({}, bearer("wrong"), bearer("x y"), {"authorization": f"Basic {KEY}"}):
        assert statuses(locked, path, headers) == unopened or access is Access.PUBLIC
    for key, opens in ((KEY, access is not Access.ADMIN), (ADMIN_KEY, True)):
        found = statuses(locked, path, bearer(key))
        assert found.isdisjoint({401, 403, 500}) if opens else found == forbidden


def test_one_key_opens_everything(one_key: Any) -> None:
    for path in ("/v1/models", "/flush_cache", "/radix_cache"):
        assert one_key.client.get(path, headers=bearer(KEY)).status_code == 200
        assert one_key.client.get(path, headers={"AUTHORIZATION": f"bEARER {KEY}"}).status_code == 200
        refused = one_key.client.get(path)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "AuthenticationError"
        assert ("object" in refused.json()) == path.startswith("/v1/")
    for path in ("/health", "/livez", "/readyz"):
        assert one_key.client.get(path).status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models/",
        "/v1/%6dodels",
        "/%2e/v1/models",
        "/./v1/models",
        "/health/../v1/models",
        "/health/..%2fv1/models",
        "/health%2f..%2fv1%2fmodels",
        "/health;/v1/models",
        "/health?/v1/models",
        "http://x/v1/models",
        "http://x/health/v1/models",
    ],
)
@pytest.mark.parametrize("host", ["localhost", "a/?x=", "x/health?", "localhost/health#", ""])
def test_no_way_round_the_door(one_key: Any, target: str, host: str) -> None:
    """Odd targets and hosts, sent raw: nothing of the model is ever told without a key."""
    with socket.create_connection(("127.0.0.1", one_key.port), timeout=10) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        reply = b"".join(iter(lambda: sock.recv(65536), b""))
    status = int(reply.split(b" ", 2)[1])
    assert b'"owned_by"' not in reply
    assert status in (400, 401, 404) or (status == 200 and reply.endswith(b"\r\n\r\n"))


def test_preflight_needs_no_key(one_key: Any) -> None:
    headers = {"origin": "http://page", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert one_key.client.options("/v1/chat/completions", headers=headers).status_code == 200
    assert one_key.client.get("/v1/models", headers={"origin": "http://page"}).headers["access-control-allow-origin"] == "*"


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("client", "headers", "local"),
    [
        (("127.0.0.1", 5), [], True),
        (("127.8.0.1", 5), [], True),
        (("::1", 5), [], True),
        (("::ffff:127.0.0.1", 5), [], True),
        (("10.0.0.7", 5), [], False),
        (("::ffff:10.0.0.7", 5), [], False),
        (("unix", 5), [], False),
        (None, [], False),
        (("127.0.0.1", 5), [(b"origin", b"http://page")], False),
    ],
)
def test_without_keys_only_programs_on_this_machine_control_it(client: Any, headers: Any, local: bool) -> None:
    scope = {"path": "/flush_cache", "raw_path": b"/flush_cache", "query_string": b"", "method": "POST", "headers": headers}
    error = Door(_no_app, api_key=None, admin_api_key=None)._refusal({**scope, "client": client})
    assert (error is None) == local
    assert error is None or error.status_code == 403
    assert Door(_no_app, api_key=None, admin_api_key=None)._refusal({**scope, "path": "/generate", "client": client}) is None


def test_an_admin_key_alone_leaves_the_rest_open(make_served: Any) -> None:
    server = make_served({"admin_api_key": ADMIN_KEY})
    try:
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/flush_cache").status_code == 401
        assert server.client.get("/flush_cache", headers=bearer(ADMIN_KEY)).status_code == 200
        told = server.client.get("/server_info").text
        assert ADMIN_KEY not in told
        assert "admin_api_key" not in told
    finally:
        server.close()


def test_long_heads_are_431(served: Any) -> None:
    long = "x" * auth.MAX_HEAD_BYTES
    for reply in (
        served.client.get("/v1/models", headers={"x-long": long}),
        served.client.get("/v1/models", params={"a": long}),
        served.client.get("/v1/models", headers={f"x-{number}": "y" * 100 for number in range(400)}),
    ):
        assert reply.status_code == 431
        assert reply.json()["error"]["type"] == "RequestTooLargeError"
    assert served.client.get("/v1/models", headers={"x-long": "x" * 8000}).status_code == 200


def test_a_head_without_end_is_cut_off(served: Any) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
        sent = 0
        try:
            while sent < 50 * head_limit.MAX_UNFINISHED_BYTES:
                sent += sock.send(b"x" * 16384)
        except OSError:
            pass
        assert sent < 50 * head_limit.MAX_UNFINISHED_BYTES
    body = {"text": "a" * 100, "unknown": "b" * (4 * head_limit.MAX_UNFINISHED_BYTES)}
    for _ in range(3):
        assert served.client.post("/generate", json=body).status_code == 200


@pytest.mark.parametrize(
    "offer", ["Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings", "Connection: upgrade\r\nuPgrade: websocket"]
)
def test_an_offer_of_another_protocol_does_not_cost_the_body(served: Any, offer: str) -> None:
    body = b'{"text": "a\\r\\nupgrade: b"}'
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\n{offer}\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        for _ in range(3):  # the connection goes on
            sock.sendall(head.encode() + body)
            reply = b""
            while b'"response_sent_to_client_ts"' not in reply:
                part = sock.recv(65536)
                assert part, reply
                reply += part
            assert reply.startswith(b"HTTP/1.1 200")
    assert len(served.manager.seen[0].input_ids) == 4 * (1 + len("a\r\nupgrade: b"))


def test_all_that_a_client_sent_ahead_knows_that_it_has_gone(served: Any, wait_for: Any, caplog: pytest.LogCaptureFixture) -> None:
    served.manager.hold = 1
    body = b'{"text": "a", "stream": true}'
    request = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
        sock.sendall(request)
        sock.recv(100)  # the first is under way
        sock.sendall(request + b"no HTTP\r\n\r\n")  # which ends the connection
        while sock.recv(1000):
            pass
    wait_for(lambda: served.manager.aborted)
    assert len(served.manager.seen) == 1
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("status", "again"), [(429, True), (503, True), (400, False), (404, False)])
def test_who_may_try_again_is_told_when(served: Any, status: int, again: bool) -> None:
    from banyan.managers.errors import RequestError

    served.manager.fault = (0, RequestError("no", status_code=status))
    reply: httpx.Response = served.client.post("/generate", json={"text": "a"})
    assert reply.status_code == status
    assert ("retry-after" in reply.headers) == again


def test_a_wrong_method_names_the_right_ones(served: Any) -> None:
    reply = served.client.delete("/v1/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.json()["object"] == "error"
