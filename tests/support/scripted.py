"""A backend whose completions are a function, and a server that answers the native routes from a model of bytes."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from banyan.lang.backend.base import Backend, Completion
from banyan.lang.chat_template import TEMPLATES, ChatTemplate
from banyan.lang.choices import ChoicesDecision, ChoicesSamplingMethod, decide
from banyan.lang.ir import SamplingParams
from banyan.lang.transcript import Prompt

Answer = Callable[[Prompt, SamplingParams], str | list[str]]


class ScriptedBackend(Backend):
    """answer(prompt, params) is the completion: a string, a list for n > 1, an exception to raise. pieces: how it streams.

    calls: (what, text, params) in order. A call waits for ``gate`` while it is cleared.
    """

    name = "the script"
    has_prefix_cache = True

    def __init__(self, answer: Answer | None = None, *, template: str = "chatml", lacks: Mapping[str, str] | None = None) -> None:
        self.answer = answer or (lambda prompt, params: f"<{len(prompt.text)}>")
        self.calls: list[tuple[str, str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.lock = threading.Lock()
        self.num_waiting = 0
        self.max_waiting = 0
        self.cached = ""
        self._template = TEMPLATES[template]
        self._lacks = dict(lacks or {})

    def unsupported(self) -> Mapping[str, str]:
        return {**super().unsupported(), **self._lacks}

    def get_model_name(self) -> str:
        return "script"

    def get_chat_template(self) -> ChatTemplate:
        return self._template

    def _call(self, what: str, text: str, params: Any) -> dict[str, Any]:
        with self.lock:
            self.calls.append((what, text, params))
            self.num_waiting += 1
            self.max_waiting = max(self.max_waiting, self.num_waiting)
            shared = len(text) if text == self.cached else len(self.cached) if text.startswith(self.cached) else 0
        assert self.gate.wait(30)
        with self.lock:
            self.num_waiting -= 1
        return {"prompt_tokens": len(text), "cached_tokens": shared, "id": str(len(self.calls))}

    def generate(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        meta = self._call("generate", prompt.text, params)
        texts = self.answer(prompt, params)
        if isinstance(texts, Exception):
            raise texts
        several = [texts] * (params.n or 1) if isinstance(texts, str) else texts
        return [Completion(text, {**meta, "completion_tokens": len(text)}) for text in several]

    def generate_stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Completion]:
        meta = self._call("stream", prompt.text, params)
        text = self.answer(prompt, params)
        if isinstance(text, Exception):
            raise text
        for count, piece in enumerate(text, 1):
            yield Completion(piece, {**meta, "completion_tokens": count})

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesSamplingMethod) -> ChoicesDecision:
        self._call("select", prompt.text, choices)
        scored = [[[-float(ord(char) % 7), ord(char), char] for char in choice] for choice in choices]
        return decide(method, choices, scored)

    def cache_prefix(self, text: str, images: Sequence[Any] = ()) -> dict[str, Any]:
        meta = self._call("cache", text, None)
        self.cached = text
        return {**meta, "completion_tokens": 0}

    def texts(self, what: str = "generate") -> list[str]:
        """The prompts of the calls of one kind."""
        return [text for kind, text, _ in self.calls if kind == what]


class WordModel:
    """Tokens are words of a small vocabulary, the longest match first, else characters; the probabilities are a fixed function of
    the whole context. bos: the id put in front, or None."""

    def __init__(self, words: Sequence[str] = (), bos: int | None = 1) -> None:
        self.words = sorted(words, key=len, reverse=True)
        self.bos = bos

    def encode(self, text: str) -> list[int]:
        ids = [] if self.bos is None else [self.bos]
        while text:
            word = next((word for word in self.words if text.startswith(word)), text[0])
            ids.append(self.id_of(word))
            text = text[len(word) :]
        return ids

    def id_of(self, word: str) -> int:
        return 1000 + self.words.index(word) if word in self.words else ord(word)

    def logprob(self, ids: Sequence[int], position: int) -> float:
        """log p(ids[position] | all before); no proper distribution, but any function of the context will do."""
        digest = 0
        for id in ids[: position + 1]:
            digest = (digest * 1_000_003 + id + 7) % (1 << 61)
        return -math.log(2 + digest % 97)


class NativeServer:
    """/generate in the wire format of SGLang, with log-probabilities, over HTTP. ``seen`` are the bodies that came in.

    ids: it can give prompt_token_ids. incremental: its streams send what is new. faults: answers that come first, (status, body).
    """

    def __init__(self, model: WordModel | None = None, *, ids: bool = True, incremental: bool = False) -> None:
        self.model = model or WordModel()
        self.ids = ids
        self.incremental = incremental
        self.seen: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.faults: list[tuple[int, bytes]] = []
        self.info: dict[str, Any] = {"model_path": "/no/such/Qwen2-7B-Instruct"}
        self.routes: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self.text = "one two"
        self.cut_stream = False
        self.num_connections = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"outer": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def generate(self, body: dict[str, Any]) -> Any:
        if "input_ids" in body:
            return [self.item(ids, body) for ids in body["input_ids"]]
        if isinstance(body["text"], list):
            return [self.item(self.model.encode(text), body) for text in body["text"]]
        n = body["sampling_params"].get("n") or 1
        items = [self.item(self.model.encode(body["text"]), body) for _ in range(n)]
        return items if n > 1 else items[0]

    def item(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        limit = body["sampling_params"].get("max_new_tokens", 128)
        text = self.text if limit else ""
        meta: dict[str, Any] = {"id": "x", "finish_reason": {"type": "length", "length": limit}, "prompt_tokens": len(ids)}
        meta |= {"completion_tokens": len(text), "cached_tokens": 0}
        if body.get("return_logprob"):
            start = body.get("logprob_start_len", -1)
            entries = (
                []
                if start < 0
                else [[self.model.logprob(ids, i) if i > start else None, ids[i], None] for i in range(start, len(ids))]
            )
            meta |= {"input_token_logprobs": entries, "output_token_logprobs": [[-1.0, 5, "x"]]}
        found: dict[str, Any] = {"text": text, "output_ids": list(range(len(text))), "meta_info": meta}
        if self.ids and body.get("return_prompt_token_ids"):
            found["prompt_token_ids"] = ids
        return found

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for count in range(1, len(self.text) + 1):
            first = count - 1 if self.incremental else 0
            reason = {"type": "stop", "matched": 2} if count == len(self.text) else None
            meta = {"id": "x", "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": count, "cached_tokens": 1}
            yield {"text": self.text[first:count], "output_ids": list(range(first, count)), "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    """HTTP for a NativeServer."""

    outer: NativeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.outer.num_connections += 1

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.outer.paths.append(self.path)
        bodies = {
            "/get_model_info": self.outer.info,
            "/server_info": {"status": "ready"},
            "/start_profile": "ok",
            "/stop_profile": "ok",
        }
        if self.path in bodies:
            self.reply(200, json.dumps(bodies[self.path]).encode())
        else:
            self.reply(404, b'{"detail":"Not Found"}')

    def do_POST(self) -> None:
        self.outer.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if self.outer.faults:
            self.reply(*self.outer.faults.pop(0))
        elif self.path in self.outer.routes:
            self.reply(200, json.dumps(self.outer.routes[self.path](body)).encode())
        elif self.path == "/flush_cache":
            self.reply(200, b"Cache flushed.\n")
        elif self.path != "/generate":
            self.reply(404, b'{"detail":"Not Found"}')
        else:
            self.outer.seen.append(body)
            self.stream(body) if body.get("stream") else self.reply(200, json.dumps(self.outer.generate(body)).encode())

    def reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = [json.dumps(chunk) for chunk in self.outer.chunks(body)]
        for event in [*events, *([] if self.outer.cut_stream else ["[DONE]"])]:
            data = f"data: {event}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")
