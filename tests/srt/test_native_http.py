"""The native routes over a real uvicorn: forms of /generate, errors, probes, control, disconnects."""

from __future__ import annotations

import json
import socket
from itertools import pairwise
from typing import Any

import httpx
import pytest

from banyan.managers.errors import EngineDeadError, RequestError
from banyan.managers.io_struct import ControlReply
from banyan.srt import http_io


def post(served: Any, path: str, body: Any, **more: Any) -> httpx.Response:
    return served.client.post(path, json=body, **more)


def events(response: httpx.Response) -> list[Any]:
    """The events' payloads; the raw text must hold nothing but events."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def test_single_prompt_answers_an_object(served: Any) -> None:
    reply = post(served, "/generate", {"text": "hi", "model": None, "image_data": None, "sampling_params": {"temperature": 0}})
    assert reply.status_code == 200
    body = reply.json()
    assert body["text"] == "Hello world"
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert body["meta_info"]["prompt_tokens"] == 3


def test_put_and_batch_and_n_answer_lists(served: Any) -> None:
    body = {"input_ids": [[5], [6, 7]], "rid": "r", "sampling_params": {"n": 2, "max_new_tokens": 2}}
    reply = served.client.put("/generate", json=body)
    assert [item["text"] for item in reply.json()] == ["Hello"] * 4
    assert [item["meta_info"]["id"] for item in reply.json()] == ["r_0", "r_1", "r_2", "r_3"]


def test_stream_is_cumulative_and_ends_with_done(served: Any) -> None:
    got = events(post(served, "/generate", {"text": "hi", "stream": True}))
    assert got[-1] == "[DONE]"
    texts = [chunk["text"] for chunk in got[:-1]]
    assert texts[-1] == "Hello world"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [chunk["meta_info"]["finish_reason"] is not None for chunk in got[:-1]] == [False] * (len(got) - 2) + [True]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b'{"text": NaN}', None),
        (b'{"text": "a", "sampling_params": {"temperature": Infinity}}', None),
        (b'{"text": "a", "priority": 1e999}', None),
        (b"[" * 100_000, None),
        (b'{"text": "\xff"}', None),
        (b'{"text": "\\ud800"}', None),
        (b'{"text": 5}', "text"),
        (b"{}", "text"),
        (b'{"text": "a", "input_ids": [1]}', "text"),
        (b'{"input_ids": []}', "input_ids"),
        (b'{"input_ids": [256]}', "input_ids"),
        (b'{"text": "a", "return_logprob": 1}', "return_logprob"),
        (b'{"text": "a", "return_logprob": true, "top_logprobs_num": 21}', "top_logprobs_num"),
        (b'{"text": "a", "return_logprob": true, "top_logprobs_num": -1}', "top_logprobs_num"),
        (b'{"text": "a", "return_logprob": true, "top_logprobs_num": 2000000000}', "top_logprobs_num"),
        (b'{"text": "a", "return_logprob": true, "logprob_start_len": 99}', "logprob_start_len"),
        (b'{"text": "a", "return_logprob": true, "logprob_start_len": -2}', "logprob_start_len"),
        (b'{"text": "a", "return_logprob": true, "token_ids_logprob": [256]}', "token_ids_logprob"),
        (b'{"text": "a", "return_logprob": true, "token_ids_logprob": [1, [2]]}', "token_ids_logprob"),
        (b'{"text": ["a", "b"], "return_logprob": [true]}', "return_logprob"),
        (b'{"text": "a", "image_data": "x.png"}', "image_data"),
        (b'{"text": "a", "lora_path": "x"}', "lora_path"),
        (b'{"text": "a", "sampling_params": {"top_p": 2}}', "top_p"),
        (b'{"text": "a", "sampling_params": {"tempratur": 2}}', "tempratur"),
        (b'{"text": "a", "sampling_params": {"regex": "a+", "ebnf": "b"}}', "ebnf"),
        (b'{"text": "a", "rid": ["x", "y"]}', "rid"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_are_400_with_the_field(served: Any, body: bytes, param: str | None, stream: bool) -> None:
    if stream and body.startswith(b'{"'):
        body = b'{"stream": true, ' + body[1:]
    reply = served.client.post("/generate", content=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 400
    assert error["param"] == param
    assert post(served, "/generate", {"text": "a"}).status_code == 200


def test_null_and_default_values_of_unsupported_fields_pass(served: Any) -> None:
    params = {
        "regex": None,
        "json_schema": None,
        "stop_regex": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
    }
    body = {"text": "a", "return_logprob": False, "logprob_start_len": -1, "lora_path": None, "session_params": None}
    assert post(served, "/generate", {**body, "sampling_params": params}).status_code == 200


def test_too_large_a_body_is_413(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_io, "MAX_BODY_BYTES", 1000)
    reply = post(served, "/generate", {"text": "a" * 1000})
    assert reply.status_code == 413
    chunked = served.client.post("/generate", content=iter([b"x" * 600] * 3))
    assert chunked.status_code == 413


def test_compressed_bodies_are_415(served: Any) -> None:
    headers = {"content-encoding": "gzip"}
    for path in ("/generate", "/v1/completions", "/update_weights_from_tensor"):
        reply = served.client.post(path, content=b"x", headers={**headers, "content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (415, "Content-Encoding")
    plain = served.client.post("/generate", json={"text": "a"}, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_large_bodies_are_parsed_all_the_same(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_io, "THREAD_BYTES", 10)
    assert post(served, "/generate", {"text": "abc", "unknown": "x" * 1000}).json()["text"] == "Hello world"
    assert post(served, "/generate", {"text": 5}).json()["error"]["param"] == "text"


def test_unknown_paths_and_methods_have_the_same_shape(served: Any) -> None:
    missing, wrong = served.client.get("/nope"), served.client.get("/generate")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["code"] == 404
    assert wrong.json()["error"]["type"] == "MethodNotAllowedError"
    assert served.client.get("/v1/nope").json()["object"] == "error"


def test_unforeseen_error_is_a_bare_500_logged_once(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    reply = post(served, "/abort_request", {"rid": "explode"})
    assert reply.status_code == 500
    assert reply.json() == {
        "error": {"message": "Internal server error.", "type": "InternalServerError", "param": None, "code": 500}
    }
    assert sum("secret" in (record.exc_text or "") or bool(record.exc_info) for record in caplog.records) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("after", [0, 2], ids=["before the first byte", "in the stream"])
def test_addresses_are_blotted_out(served: Any, path: str, stream: bool, after: int) -> None:
    served.manager.fault = (after, RequestError("bad <object at 0x7f00deadbeef>"))
    prompt = {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}}
    body = prompt.get(path, {"messages": [{"role": "user", "content": "a"}]})
    reply = post(served, path, {**body, "stream": stream})
    assert "bad <object at 0x...>" in reply.text
    assert "0x7f" not in reply.text


def test_dead_engine_is_503_with_retry_after(served: Any) -> None:
    served.manager.fault = (0, EngineDeadError("it died", "a traceback"))
    for stream in (False, True):
        reply = post(served, "/generate", {"text": "a", "stream": stream})
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        assert "traceback" not in reply.text


def test_error_after_the_first_byte_is_an_event_and_no_done(served: Any) -> None:
    served.manager.fault = (2, EngineDeadError("it died"))
    got = events(post(served, "/generate", {"text": "a", "stream": True, "incremental": True}))
    assert got[0]["text"].startswith("Hel")
    assert got[-1] == {"error": {"message": "The engine has died.", "type": "EngineDeadError", "param": None, "code": 503}}


def raw_post(served: Any, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", served.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


DISCONNECTS = [
    ("/generate", {"text": "a"}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 9}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize("hold", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), DISCONNECTS)
def test_disconnect_aborts(served: Any, wait_for: Any, path: str, body: dict[str, Any], stream: bool, hold: int) -> None:
    served.manager.hold = hold  # 0: nothing has come yet, as if queued
    sock = raw_post(served, path, {**body, "stream": stream, "rid": "gone"})
    wait_for(lambda: "gone" in served.manager.live)
    if stream and hold:
        assert b"200 OK" in sock.recv(100)
    assert served.manager.aborted == []
    sock.close()
    wait_for(lambda: served.manager.aborted == ["gone"])
    served.manager.hold = None
    assert post(served, "/generate", {"text": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_no_header_before_the_first_output(served: Any, wait_for: Any, path: str, body: dict[str, Any]) -> None:
    served.manager.hold = 0
    sock = raw_post(served, path, {**body, "stream": True, "rid": "x"})
    wait_for(lambda: "x" in served.manager.live)
    sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    served.manager.hold = None
    sock.settimeout(20)
    assert sock.recv(15) == b"HTTP/1.1 200 OK"
    sock.close()


def test_probes_follow_the_phases(served: Any) -> None:
    def codes() -> list[int]:
        return [served.client.get(path).status_code for path in ("/livez", "/health", "/readyz", "/health_generate")]

    assert codes() == [200, 200, 200, 200]
    assert served.client.get("/readyz").json() == {"status": "ready", "reason": None}
    served.manager.draining = True
    assert codes() == [200, 503, 503, 503]
    assert served.client.get("/readyz").json()["status"] == "draining"
    assert post(served, "/generate", {"text": "a"}).status_code == 503
    served.manager.draining = False
    served.manager.health_now = {"alive": False, "ready": False, "reason": "stands still"}
    assert codes() == [503, 503, 503, 503]
    assert "stands still" in served.client.get("/health").text
    served.state.tm = None
    assert codes() == [200, 503, 503, 503]
    for reply in (
        post(served, "/generate", {"text": "a"}),
        served.client.get("/model_info"),
        served.client.get("/v1/models"),
    ):
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == "The server is starting."


def test_health_generate_runs_a_real_request(served: Any) -> None:
    assert served.client.get("/health").status_code == 200
    assert served.manager.seen == []
    assert served.client.get("/health_generate").status_code == 200
    (probe,) = served.manager.seen
    assert probe.rid.startswith("HEALTH_CHECK_")
    assert probe.sampling_params.max_new_tokens == 1
    served.manager.fault = (0, EngineDeadError("it died"))
    assert served.client.get("/health_generate").status_code == 503


def test_information(served: Any) -> None:
    for path in ("/model_info", "/get_model_info"):
        info = served.client.get(path).json()
        assert (info["model_path"], info["served_model_name"], info["is_generation"]) == ("smollm2", "small", True)
    for path in ("/server_info", "/get_server_info"):
        info = served.client.get(path).json()
        assert info["port"] == 30000
        assert info["internal_states"] == [{"num_running": 0}]
        assert info["max_total_num_tokens"] == 1000
        assert info["version"]
    assert served.client.get("/").json() == "Banyan is running"
    assert served.client.head("/").status_code == 200
    document = served.client.get("/openapi.json").json()
    assert "prompt" in document["components"]["schemas"]["CompletionBody"]["properties"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(served: Any, method: str) -> None:
    reply = served.client.request(method, "/flush_cache?timeout=2.5")
    assert (reply.status_code, served.manager.flush_timeouts) == (200, [2.5])
    served.manager.flush_reply = ControlReply(call_id=0, success=False, message="busy")
    reply = served.client.request(method, "/flush_cache")
    assert (reply.status_code, reply.text) == (400, "busy")
    for bad in ("nan", "-1", "x"):
        reply = served.client.request(method, f"/flush_cache?timeout={bad}")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "timeout"


def test_abort_request(served: Any) -> None:
    for bad in ({}, {"rid": ""}, {"rid": None, "abort_all": False}, {"rid": 5}):
        reply = post(served, "/abort_request", bad)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "rid")
    post(served, "/generate", {"text": "a", "rid": "one"})
    assert post(served, "/abort_request", {"rid": "on"}).json() == {"aborted": 0}
    assert post(served, "/abort_request", {"rid": "one"}).json() == {"aborted": 1}
    assert post(served, "/abort_request", {"abort_all": True}).json() == {"aborted": 1}


def test_http2_preface_is_refused_cleanly(served: Any) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        sock.settimeout(20)
        assert sock.recv(100)[:12] in (b"HTTP/1.1 400", b"")
    assert served.client.get("/health").status_code == 200


def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.sendall(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"text": ')
    assert post(served, "/generate", {"text": "a"}).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_does_not_come_is_408(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan.srt.http_io.BODY_STALL", 0.2)
    host, port = served.client.base_url.host, served.client.base_url.port
    with socket.create_connection((host, port)) as connection:
        connection.settimeout(20)
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        received = b""
        while part := connection.recv(65536):  # until the server closes
            received += part
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"RequestTimeoutError" in received
