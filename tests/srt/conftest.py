"""A real uvicorn in a thread over a tokenizer manager whose answers are a script."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from banyan.managers.config import ModelInfo, SchedulerInfo, TokenizerManagerConfig
from banyan.managers.generate_json import GenerateFormat
from banyan.managers.generation import GenerateInput, Generation, Output
from banyan.managers.io_struct import ControlReply, FinishReason, Heartbeat
from banyan.managers.ipc import IpcNames
from banyan.managers.processes.health import Health
from banyan.managers.request_plan import RequestPlan
from banyan.managers.request_stats import RequestStats
from banyan.managers.request_validator import RequestValidator
from banyan.managers.sessions.sessions import OpenSession, SessionController
from banyan.srt.http_server import create_app, make_server
from banyan.srt.listen import bind
from banyan.srt.server_args import ServerArgs
from banyan.srt.server_state import ServerState

CONTEXT = 200
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


class ByteTokenizer:
    """One token per byte; id 1 is BOS."""

    def __init__(self) -> None:
        self.chat_templates = {"default": TEMPLATE}

    byte_table = None
    bos_token, eos_token = "\x01", "\x02"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(id for id in ids if not (skip_special_tokens and id < 3)).decode()


class FakeManager:
    """Answers every choice with the words of ``script``, then EOS. ``hold`` stops it before the word with that number."""

    def __init__(self) -> None:
        names = IpcNames(directory="", scheduler="", detokenizer="", tokenizer="")
        self.config = TokenizerManagerConfig(ipc=names, model_path="smollm2", served_model_name="small", tokenizer_path="/nowhere")
        model = ModelInfo(
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            vocab_size=256,
            context_len=CONTEXT,
            eos_token_ids=[2],
            bos_token_id=1,
            dtype="float32",
            device="cpu",
            attention_backend="native",
            load_format="gguf",
        )
        self.info = SchedulerInfo(
            model=model,
            max_total_num_tokens=1000,
            max_req_input_len=CONTEXT - 1,
            max_req_len=CONTEXT,
            max_running_requests=4,
            page_size=1,
            chunked_prefill_size=None,
            overlap=True,
        )
        self.tokenizer = ByteTokenizer()
        self.validator = RequestValidator(self.config, self.info, self.tokenizer)
        self.draining = False
        self.is_full = False
        self.script = ["Hel", "lo", " wor", "ld"]
        self.hold: int | None = None
        self.fault: tuple[int, Exception] | None = None  # before which word, and what
        self.end: FinishReason | None = None  # instead of EOS
        self.seen: list[Any] = []  # GenerateReq messages
        self.plans: list[RequestPlan] = []
        self.aborted: list[str] = []
        self.live: dict[str, Generation] = {}
        self.sessions = SessionController(8)
        self.flush_reply = ControlReply(call_id=0)
        self.flush_timeouts: list[float] = []
        self.controls: list[Any] = []
        self.control_reply = ControlReply(call_id=7, message="Done.", state={"values": []})
        self.health_now: dict[str, Any] = {"alive": True, "ready": True, "reason": ""}
        self.tasks: set[asyncio.Task[None]] = set()
        self.stats = RequestStats()
        self.num_live = 0

    async def wait_idle(self, timeout: float) -> bool:
        return True

    async def last_turns(self) -> list[str]:
        return []

    async def start(self, request: GenerateInput) -> Generation:
        plan = self.validator.plan(request)
        self.plans.append(plan)
        messages = self.validator.prepare(plan)
        self.seen += messages
        generation = Generation(
            plan.rids, num_prompts=plan.num_prompts, n=plan.n, single=plan.is_single_prompt, abort=self.aborted.extend
        )
        generation.begin(plan, messages)
        for index, message in enumerate(messages):
            self.live[message.rid] = generation
            task = asyncio.ensure_future(self._play(generation, index, message))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return generation

    async def _play(self, generation: Generation, index: int, message: Any) -> None:
        limit = message.sampling_params.max_new_tokens
        count = 0
        for number, word in enumerate(self.script):
            while self.hold is not None and number >= self.hold:
                await asyncio.sleep(0.005)
                if message.rid in self.aborted:
                    self._push(generation, index, message, "", count, FinishReason(kind="abort", message="Aborted."))
                    return
            if self.fault is not None and number == self.fault[0]:
                generation.fail(self.fault[1])
                return
            count += 1
            done = FinishReason(kind="length", length=limit) if count == limit else None
            self._push(generation, index, message, word, count, done)
            if done:
                return
            await asyncio.sleep(0)
        self._push(generation, index, message, "", count + 1, self.end or FinishReason(kind="stop", matched=2))

    def _push(self, generation: Generation, index: int, message: Any, text: str, count: int, reason: FinishReason | None) -> None:
        output = Output(
            index=index,
            text=text,
            token_ids=[count],
            finish_reason=reason,
            prompt_tokens=len(message.input_ids) // 4,
            completion_tokens=count,
            cached_tokens=3 + index,
            num_retractions=0,
        )
        generation.push(output)

    async def generate(self, request: GenerateInput, *, probe: bool = False) -> Any:
        return await self._format(await self.start(request), request).whole()

    def stream(self, generation: Generation, request: GenerateInput) -> Any:
        return self._format(generation, request).chunks(incremental=bool(request.incremental))

    def _format(self, generation: Generation, request: GenerateInput) -> GenerateFormat:
        return GenerateFormat(generation, weight_version="default", with_prompt_ids=request.return_prompt_token_ids)

    def abort(self, rid: str, abort_all: bool = False) -> int:
        if rid == "explode":
            raise RuntimeError("object at 0x7f00deadbeef has a secret")
        rids = list(self.live) if abort_all else [name for name in self.live if name == rid]
        self.aborted += rids
        return len(rids)

    async def flush_cache(self, timeout: float = 0.0) -> ControlReply:
        self.flush_timeouts.append(timeout)
        return self.flush_reply

    async def control(self, make: Callable[[int], Any]) -> ControlReply:
        message = make(7)
        self.controls.append(message)
        return self.control_reply

    def set_weight_version(self, version: str) -> None:
        self.config = msgspec.structs.replace(self.config, weight_version=version)

    async def in_pool(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)

    async def open_session(self, request: OpenSession) -> str:
        session_id = request.session_id or f"session {len(self.sessions)}"
        self.sessions.open(session_id, request, now=0)
        return session_id

    async def close_session(self, session_id: str) -> None:
        self.sessions.close(session_id)

    async def pause_generation(self, mode: str = "abort") -> ControlReply:
        return ControlReply(call_id=0, message=f"Paused: {mode}.")

    async def continue_generation(self) -> ControlReply:
        return ControlReply(call_id=0, message="Continued.")

    async def internal_state(self) -> dict[str, Any]:
        return {"num_running": 0}

    async def radix_cache(self, k: int = 10) -> dict[str, Any]:
        return {"size_tokens": 0, "hottest": [], "k": k}

    async def explain_cache(self, request: GenerateInput) -> dict[str, Any]:
        message = self.validator.prompt(request)
        self.seen.append(message)
        return {"num_tokens": len(message.input_ids) // 4, "would_hit": 0, "nearest": None}

    def health(self) -> Health:
        beat = Heartbeat(loop_age=0, forward_age=0, num_running=0, num_waiting=0)
        return Health(heartbeat_age=0, forward_age=0, num_running=0, num_waiting=0, replicas={0: beat}, **self.health_now)


class Served:
    """A running server: its url, the manager behind it and its state."""

    def __init__(self, options: dict[str, Any]) -> None:
        args = ServerArgs.from_kwargs(options)
        self.state = ServerState(args)
        self.reset()
        self.state.mark_ready()
        self.server = make_server(create_app(self.state), args, drain_seconds=5)
        self.sock = bind("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=20)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_for(lambda: self.server.started)

    def reset(self) -> None:
        """A fresh manager."""
        self.manager = FakeManager()
        self.state.attach(self.manager)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.sock]))

    def close(self) -> None:
        self.manager.hold = None
        self.client.close()
        self.server.stop(at_once=True)
        self.thread.join(10)


def wait_for(condition: Callable[[], Any], timeout: float = 20.0) -> None:
    """Poll until the condition holds, or fail."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            pytest.fail("waited in vain")
        time.sleep(0.005)


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., None]:
    return wait_for


@pytest.fixture(scope="session")
def make_served() -> type[Served]:
    """Servers with options of their own; the caller closes them."""
    return Served


@pytest.fixture(scope="session")
def running_server() -> Iterator[Served]:
    server = Served({})
    yield server
    server.close()


@pytest.fixture
def served(running_server: Served) -> Iterator[Served]:
    """The one server, with a manager of the test's own."""
    running_server.reset()
    yield running_server
    running_server.manager.hold = None
