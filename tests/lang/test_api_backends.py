"""OpenAI-style and Anthropic backends against servers that answer in their formats, and calls that run ahead."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from scripted import ScriptedBackend

import banyan as bn
from banyan.lang.errors import LangError

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}


class FakeOpenAI:
    """answer(body) -> text. bodies: what was asked for."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], str] = lambda body: "sunny"
        self.refuse = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.bodies.append(body)
                if outer.refuse:
                    self.reply(
                        400, json.dumps({"error": {"message": "not today", "type": "invalid_request_error"}}), "application/json"
                    )
                elif body.get("stream"):
                    events = [*outer.chunks(body), "[DONE]"]
                    self.reply(200, "".join(f"data: {event}\n\n" for event in events), "text/event-stream")
                else:
                    self.reply(200, json.dumps(outer.whole(body)), "application/json")

            def reply(self, status: int, text: str, kind: str) -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self.thread = Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self.answer(body)
        if body.get("echo"):
            choices = [{"index": i, "finish_reason": "length", **self.echo(prompt)} for i, prompt in enumerate(body["prompt"])]
        elif "messages" in body:
            message = {"role": "assistant", "content": text}
            choices = [{"index": i, "message": message, "finish_reason": "stop"} for i in range(body.get("n") or 1)]
        else:
            choices = [{"index": i, "text": text, "finish_reason": "stop"} for i in range(body.get("n") or 1)]
        return {"id": "c1", "object": "x", "created": 1, "model": "m", "choices": choices, "usage": USAGE}

    @staticmethod
    def echo(prompt: str) -> dict[str, Any]:
        tokens = [*prompt, "?"]
        values = [None if i == 0 else -math.log(2 + sum(map(ord, tokens[: i + 1])) % 50) for i in range(len(tokens))]
        return {
            "text": prompt + "?",
            "logprobs": {"tokens": tokens, "token_logprobs": values, "text_offset": [], "top_logprobs": []},
        }

    def chunks(self, body: dict[str, Any]) -> Iterator[str]:
        base = {"id": "c1", "object": "x", "created": 1, "model": "m", "usage": None}
        for char in self.answer(body):
            piece = {"delta": {"content": char}} if "messages" in body else {"text": char}
            yield json.dumps({**base, "choices": [{"index": 0, "finish_reason": None, **piece}]})
        last = {"delta": {}} if "messages" in body else {"text": ""}
        yield json.dumps({**base, "choices": [{"index": 0, "finish_reason": "stop", **last}]})
        yield json.dumps({**base, "choices": [], "usage": USAGE})


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    server = FakeOpenAI()
    yield server
    server.close()


@pytest.fixture
def make(server: FakeOpenAI) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def backend(name: str = "m", **options: Any) -> Any:
        made.append(bn.OpenAI(name, base_url=server.url, api_key="k", max_retries=0, **options))
        return made[-1]

    yield backend
    for each in made:
        each.client.close()


@bn.function
def weather(s: Any) -> None:
    s += bn.system("Be brief.")
    s += bn.user("How is the weather?")
    s += bn.assistant(bn.gen("x", max_tokens=9, stop="\n"))


def test_a_chat_model_gets_messages(server: FakeOpenAI, make: Any) -> None:
    backend = make()
    state = weather.run(backend=backend, temperature=0.5, seed=3)
    (body,) = server.bodies
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is the weather?"}]
    assert (body["max_completion_tokens"], body["temperature"], body["stop"]) == (9, 0.5, ["\n"])
    assert "top_k" not in body
    assert state["x"] == "sunny"
    assert state.get_meta_info("x")["cached_tokens"] == 4
    assert backend.token_usage == {"prompt_tokens": 5, "completion_tokens": 2}


def test_streams_and_n(server: FakeOpenAI, make: Any) -> None:
    for chat in (True, False):
        state = weather.run(backend=make(is_chat_model=chat), stream=True)
        assert "".join(state.text_iter("x")) == "sunny"
        assert state.get_meta_info("x")["prompt_tokens"] == 5
        assert weather.run(backend=make(is_chat_model=chat), n=2)["x"] == ["sunny", "sunny"]


def test_dialects(server: FakeOpenAI, make: Any) -> None:
    @bn.function
    def program(s: Any) -> None:
        s += "a" + bn.gen("x", regex="[a-z]+", top_k=3, min_tokens=1)

    for dialect, expected in (
        ("sglang", {"regex": "[a-z]+", "top_k": 3, "min_tokens": 1}),
        ("vllm", {"structured_outputs": {"regex": "[a-z]+"}, "top_k": 3, "min_tokens": 1}),
    ):
        program.run(backend=make(is_chat_model=False, dialect=dialect))
        assert {name: server.bodies[-1].get(name) for name in expected} == expected
        assert server.bodies[-1]["prompt"] == "a"
    with pytest.raises(bn.UnsupportedError, match=r"min_new_tokens|regex|top_k"):
        program.run(backend=make(is_chat_model=False))
    with pytest.raises(ValueError, match="dialect"):
        make(dialect="other")


def test_json_schema(server: FakeOpenAI, make: Any) -> None:
    @bn.function
    def program(s: Any) -> None:
        s += bn.user("q") + bn.assistant(bn.gen("x", json_schema='{"type": "object"}'))

    program.run(backend=make())
    assert server.bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_select_on_a_completion_model_uses_echo(server: FakeOpenAI, make: Any) -> None:
    def mean(text: str, choice: str) -> float:
        values = server.echo(text + choice)["logprobs"]["token_logprobs"][len(text) : -1]
        return float(sum(values) / len(values))

    @bn.function
    def program(s: Any) -> None:
        s += "Is it?" + bn.select("x", [" yes", " no", " maybe"])
        s += bn.select("y", [" so", " thus"], choices_method=bn.unconditional_likelihood_normalized)

    backend = make(is_chat_model=False)
    state = program.run(backend=backend)
    assert state["x"] == max([" yes", " no", " maybe"], key=lambda choice: mean("Is it?", choice))
    assert server.bodies[0]["prompt"] == ["Is it?", "Is it? yes", "Is it? no", "Is it? maybe"]
    assert server.bodies[-1]["prompt"] == [" so", " thus"]
    with pytest.raises(bn.UnsupportedError, match="select: a chat interface"):
        program.run(backend=make())


def test_what_a_chat_model_cannot_continue(server: FakeOpenAI, make: Any) -> None:
    @bn.function
    def outside(s: Any) -> None:
        s += "text" + bn.gen("x")

    @bn.function
    def continued(s: Any) -> None:
        s += bn.user("q") + bn.assistant("It is " + bn.gen("x"))

    for program, message in ((outside, "in an assistant's turn"), (continued, "must be the first of an assistant's turn")):
        with pytest.raises(bn.StepError, match=message):
            program.run(backend=make())
    assert server.bodies == []


def test_errors(server: FakeOpenAI, make: Any) -> None:
    server.refuse = True
    for stream in (False, True):
        with pytest.raises(bn.StepError, match="not today") as caught:
            list(weather.run(backend=make(), stream=stream).text_iter())
        assert caught.value.__cause__.status == 400  # type: ignore[union-attr]


def test_a_missing_package_says_how_to_install_it(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(LangError, match=r"pip install 'banyan-engine\[anthropic\]'"):
        bn.Anthropic("claude")


# --- Anthropic --------------------------------------------------------------------------------------------------------------------


class FakeAnthropic(types.ModuleType):
    """The part of the package that the backend uses."""

    class AnthropicError(Exception):
        status_code = 529

    def __init__(self) -> None:
        super().__init__("anthropic")
        self.bodies: list[dict[str, Any]] = []
        self.fail = False

    def Anthropic(self, **_: Any) -> Any:
        return types.SimpleNamespace(messages=types.SimpleNamespace(create=self.create, stream=self.stream))

    def create(self, **body: Any) -> Any:
        self.bodies.append(body)
        if self.fail:
            raise self.AnthropicError("overloaded")
        usage = types.SimpleNamespace(input_tokens=3, output_tokens=2, cache_read_input_tokens=4)
        block = types.SimpleNamespace(type="text", text="sunny")
        return types.SimpleNamespace(content=[block], usage=usage, id="m1", stop_reason="end_turn")

    def stream(self, **body: Any) -> Any:
        final = self.create(**body)

        class Stream:
            text_stream = iter("sunny")

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def get_final_message(self) -> Any:
                return final

        return Stream()


def test_anthropic(monkeypatch: Any) -> None:
    package = FakeAnthropic()
    monkeypatch.setitem(sys.modules, "anthropic", package)
    backend = bn.Anthropic("claude")
    state = weather.run(backend=backend, temperature=0.5, top_k=4)
    assert package.bodies[0] == {
        "model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": "How is the weather?"}], "temperature": 0.5,
        "stop_sequences": ["\n"], "system": "Be brief.", "top_k": 4,
    }  # fmt: skip
    assert state["x"] == "sunny"
    assert (state.get_meta_info("x")["prompt_tokens"], state.get_meta_info("x")["cached_tokens"]) == (7, 4)
    assert "".join(weather.run(backend=backend, stream=True).text_iter("x")) == "sunny"
    with pytest.raises(bn.UnsupportedError, match="seed"):
        weather.run(backend=backend, seed=1)
    package.fail = True
    for stream in (False, True):
        with pytest.raises(bn.StepError, match="overloaded"):
            list(weather.run(backend=backend, stream=stream).text_iter())


# --- calls that run ahead ---------------------------------------------------------------------------------------------------------


class Billed(ScriptedBackend):
    """A backend that is paid per call."""

    wants_speculation = True


def test_a_completion_model_writes_ahead() -> None:
    script = Billed(lambda prompt, params: "Paris\nLanguage: French\nMore: no")

    @bn.function(num_api_spec_tokens=64)
    def facts(s: Any) -> None:
        s += "Capital: " + bn.gen("capital", stop="\n") + "\nLanguage: " + bn.gen("language", stop="\n")
        s += "\nFood: " + bn.gen("food", stop="\n")

    state = facts.run(backend=script)
    assert (state["capital"], state["language"]) == ("Paris", "French")
    assert state.text().startswith("Capital: Paris\nLanguage: French\nFood: Paris")
    assert len(script.calls) == 2
    assert (script.calls[0][2].max_new_tokens, script.calls[0][2].stop) == (128, None)


def test_a_chat_model_is_asked_once_per_turn() -> None:
    class Chat(Billed):
        is_chat_model = True

    script = Chat(lambda prompt, params: "Name: Bo\nAge: 7 years")

    @bn.function(num_api_spec_tokens=64)
    def profile(s: Any, early: bool = False) -> None:
        s += bn.user("who?")
        s += bn.assistant_begin()
        s += "Name: " + bn.gen("name", stop="\n") + "\nAge: " + bn.gen("age", stop=" years")
        if early:
            assert s["name"] == "Bo"
        s += bn.assistant_end()

    script.answer = lambda prompt, params: "Bo\nAge: 7 years"
    for early in (False, True):
        state = profile.run(early, backend=script)
        assert (state["name"], state["age"]) == ("Bo", "7")
        assert state.messages()[-1]["content"] == "Name: Bo\nAge: 7"
    assert len(script.calls) == 2
    script.answer = lambda prompt, params: "something else"
    with pytest.raises(bn.StepError, match="does not follow the fixed text"):
        profile.run(backend=script)


def test_a_backend_with_a_cache_never_runs_ahead() -> None:
    script = ScriptedBackend(lambda prompt, params: "x\ny")

    @bn.function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        s += "a" + bn.gen("x", stop="\n") + bn.gen("y", stop="\n")

    program.run(backend=script)
    assert [params.max_new_tokens for _, _, params in script.calls] == [128, 128]
