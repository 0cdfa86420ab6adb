"""RuntimeEndpoint against a server that speaks SGLang's wire format: bodies, streams, errors, connections, templates."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from scripted import NativeServer, WordModel
from tiny_tokenizers import byte_level_folder

import banyan as bn
from banyan.lang.backend.http import HttpClient, message_of
from banyan.lang.backend.runtime_endpoint import RuntimeEndpoint
from banyan.lang.chat_template import TemplateError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture
def server() -> Iterator[NativeServer]:
    server = NativeServer(WordModel())
    yield server
    server.close()


@bn.function
def plain(s: Any, text: str, **params: Any) -> str:
    s += text + bn.gen("x", **params)
    value: str = s["x"]
    return value


@bn.function
def talk(s: Any) -> None:
    s += bn.user("hi") + bn.assistant(bn.gen("x"))


def test_the_body_of_a_gen(server: NativeServer) -> None:
    state = plain.run("abc", backend=server.url, max_new_tokens=5, temperature=0.5, stop="\n", seed=3, return_logprob=True)
    assert state["x"] == "one two"
    (body,) = server.seen
    assert body["text"] == "abc"
    params = body["sampling_params"]
    assert params["sampling_seed"] > 0
    assert {**params, "sampling_seed": 0} == {
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "max_new_tokens": 5, "n": 1, "temperature": 0.5,
        "stop": "\n", "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "ignore_eos": False, "sampling_seed": 0,
    }  # fmt: skip
    assert body["return_logprob"] is True
    assert state.get_meta_info("x")["output_token_logprobs"] == [[-1.0, 5, "x"]]


def test_what_is_constrained_is_sent(server: NativeServer) -> None:
    @bn.function
    def program(s: Any) -> None:
        s += "a" + bn.gen("x", regex="[0-9]+") + bn.gen("y", json_schema='{"type":"object"}') + bn.gen("z", ebnf="root ::= 'a'")
        s += bn.gen("i", dtype=int) + bn.gen("m", min_tokens=2, repetition_penalty=1.2, stop_token_ids=[7], seed=5)

    program.run(backend=RuntimeEndpoint(server.url))
    sent = [body["sampling_params"] for body in server.seen]
    assert sent[0]["regex"] == "[0-9]+"
    assert "regex" not in sent[1]
    assert sent[1]["json_schema"] == '{"type":"object"}'
    assert sent[2]["ebnf"] == "root ::= 'a'"
    assert (sent[3]["regex"], sent[3]["stop"]) == (r"[-+]?[0-9]+[ \n]*", [" ", "\n"])
    assert [sent[4][name] for name in ("min_new_tokens", "repetition_penalty", "stop_token_ids", "sampling_seed")] == [
        2,
        1.2,
        [7],
        5,
    ]


def test_n(server: NativeServer) -> None:
    assert plain.run("abc", backend=server.url, n=3)["x"] == ["one two"] * 3


def test_cache_prefix_and_flush(server: NativeServer) -> None:
    backend = RuntimeEndpoint(server.url)
    assert backend.cache_prefix("abc")["prompt_tokens"] == 4
    assert server.seen[-1] == {"text": "abc", "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
    assert backend.prepare_forks("abcd")["prompt_tokens"] == 5, "this server may compute it once for each call"
    assert bn.flush_cache(backend) is True
    server.faults.append((400, b"busy"))
    assert bn.flush_cache(backend) is False
    server.faults.append((500, b"oops"))
    with pytest.raises(bn.BackendError, match="500: oops"):
        bn.flush_cache(backend)
    assert bn.get_server_info(backend) == {"status": "ready"}
    backend.start_profile()
    backend.stop_profile()
    assert server.paths[-3:] == ["/server_info", "/start_profile", "/stop_profile"]
    backend.shutdown()


@pytest.mark.parametrize("incremental", [True, False])
def test_streams_that_repeat_and_streams_that_do_not(server: NativeServer, incremental: bool) -> None:
    server.incremental = incremental
    state = plain.run("abc", backend=server.url, stream=True)
    assert "".join(state.text_iter("x")) == "one two"
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": 2}
    assert (server.seen[0]["stream"], server.seen[0]["incremental"]) == (True, True)


def test_a_stream_that_breaks_off(server: NativeServer) -> None:
    server.cut_stream = True
    state = plain.run("abc", backend=server.url, stream=True)
    with pytest.raises(bn.StepError, match=r"before \[DONE\]"):
        list(state.text_iter())


# --- errors -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"error": {"message": "top_p must be in (0, 1], got 2."}}, "400: top_p must be"),
        (401, {"error": "Unauthorized"}, "401: Unauthorized"),
        (400, {"object": "error", "message": "flat"}, "400: flat"),
        (422, {"detail": [{"loc": ["x"]}]}, "422: .*loc"),
    ],
)
def test_error_bodies_of_all_shapes(server: NativeServer, status: int, body: Any, message: str) -> None:
    server.faults.append((status, json.dumps(body).encode()))
    with pytest.raises(bn.StepError, match=message) as caught:
        plain.run("abc", backend=RuntimeEndpoint(server.url))
    assert caught.value.__cause__.status == status  # type: ignore[union-attr]
    server.faults.append((status, json.dumps(body).encode()))
    with pytest.raises(bn.StepError, match=message):
        list(plain.run("abc", backend=RuntimeEndpoint(server.url), stream=True).text_iter())


def test_an_abort_is_an_error(server: NativeServer) -> None:
    reason = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    server.faults.append((200, json.dumps({"text": "", "meta_info": {"finish_reason": reason}}).encode()))
    with pytest.raises(bn.StepError, match="queue is full") as caught:
        plain.run("abc", backend=server.url)
    assert caught.value.__cause__.status == 503  # type: ignore[union-attr]


def test_no_server_and_no_url() -> None:
    with pytest.raises(bn.BackendError, match="Connection refused"):
        RuntimeEndpoint("http://127.0.0.1:9")
    for url in ("localhost:30000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="base URL"):
            RuntimeEndpoint(url)


def test_messages_of_error_bodies() -> None:
    assert message_of(b"") == "no message"
    assert message_of(b"plain") == "plain"
    assert message_of(b"[1]") == "[1]"


# --- connections ------------------------------------------------------------------------------------------------------------------


def test_connections_are_kept(server: NativeServer) -> None:
    backend = RuntimeEndpoint(server.url)
    for stream in (False, True, False, True):
        list(plain.run("abc", backend=backend, stream=stream).text_iter())
    assert server.num_connections == 1
    plain.run_batch([(str(i),) for i in range(20)], backend=backend, num_threads=4)
    assert server.num_connections <= 6


def test_a_kept_connection_that_the_server_has_closed_is_replaced(server: NativeServer) -> None:
    client = HttpClient(server.url)
    client.json("GET", "/server_info")
    ((_, connection),) = client._idle
    connection.sock.shutdown(2)
    assert client.json("GET", "/server_info") == {"status": "ready"}


def test_api_key_and_base_path() -> None:
    client = HttpClient("https://example.org/base/", api_key="k", verify=False)
    assert client._headers["Authorization"] == "Bearer k"
    assert client._context is not None
    assert not client._context.check_hostname
    assert HttpClient("https://example.org")._context.check_hostname  # type: ignore[union-attr]


def test_many_threads_on_one_client(server: NativeServer) -> None:
    client = HttpClient(server.url)
    answers: list[Any] = []
    body = {"text": "abc", "sampling_params": {}}
    workers = [threading.Thread(target=lambda: answers.append(client.json("POST", "/generate", body)["text"])) for _ in range(24)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == ["one two"] * 24
    client.close()
    assert client._idle == []


# --- templates --------------------------------------------------------------------------------------------------------------------


def test_the_server_is_asked_for_its_template(server: NativeServer) -> None:
    def render(body: dict[str, Any]) -> Any:
        text = "".join(f"[{m['role']}]{m['content']}[/]" for m in body["messages"])
        return {"prompt": text + ("[assistant]" if body["add_generation_prompt"] else "")}

    server.routes["/apply-template"] = render
    assert talk.run(backend=server.url).text() == "[user]hi[/][assistant]one two[/]"
    assert server.seen[-1]["sampling_params"]["stop"] == ["[/]"]


def test_a_model_without_a_template_says_so(server: NativeServer) -> None:
    server.faults.append((400, b'{"error":{"message":"This model has no chat template"}}'))
    with pytest.raises(bn.StepError, match="has no chat template") as caught:
        talk.run(backend=server.url)
    assert isinstance(caught.value.__cause__, TemplateError)


def test_a_server_that_cannot_be_asked(server: NativeServer, tmp_path: Any) -> None:
    """SGLang's has no such route: the tokenizer's folder where it is here, else the path's name, else a refusal."""
    assert talk.run(backend=server.url).messages()[0]["content"] == "You are a helpful assistant."
    folder = byte_level_folder(tmp_path, chat_template=TEMPLATE)
    server.info = {"model_path": "x", "tokenizer_path": str(folder)}
    assert talk.run(backend=server.url).text() == "<user>hi;<assistant>one two;"
    server.info = {"model_path": "SmolLM2-135M"}
    with pytest.raises(bn.StepError, match="give RuntimeEndpoint a chat_template_name"):
        talk.run(backend=server.url)
    named = RuntimeEndpoint(server.url, chat_template_name="llama-3-instruct")
    assert talk.run(backend=named).text().startswith("<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>")
    with pytest.raises(ValueError, match="known are"):
        RuntimeEndpoint(server.url, chat_template_name="mine")


def test_pictures_need_a_model_that_sees(server: NativeServer) -> None:
    @bn.function
    def program(s: Any) -> None:
        s += bn.image("http://example.org/x.png") + "what?" + bn.gen("x")

    with pytest.raises(bn.UnsupportedError, match="does not understand images"):
        program.run(backend=server.url)
    server.info["has_image_understanding"] = True
    program.run(backend=server.url)
    assert server.seen[-1]["image_data"] == ["http://example.org/x.png"]
    assert server.seen[-1]["text"] == "<image>what?"
