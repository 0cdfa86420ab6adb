"""Engine: the server's engine inside a Python program, without HTTP. Its event loop runs in a thread of its own.

So it works in scripts, threads, notebooks and under any asyncio loop of the user, needs no __main__ guard and installs no signal
handler.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from ..managers.chat_template import ChatTemplate
from ..managers.errors import RequestError, StartError
from ..managers.generation import UNSUPPORTED, GenerateInput, Generation
from ..managers.io_struct import ControlReply
from ..managers.model_service import ModelService
from ..managers.sessions.sessions import OpenSession
from ..managers.tokenizer_manager import TokenizerManager
from . import info, tracing
from .engine_control import EngineControl
from .launcher import launch
from .loop_thread import LoopThread, Stream
from .server_args import ServerArgs
from .supervisor import Supervisor

Prompt = str | list[str] | None
Params = dict[str, Any] | list[dict[str, Any]] | None
Ids = Sequence[int | Sequence[int]] | None
Answer = dict[str, Any] | list[dict[str, Any]]

STOP_TIMEOUT = 10.0  # seconds that the processes get to leave by themselves
# SGLang's order of generate's arguments after input_ids.
POSITIONAL = (
    "image_data",
    "audio_data",
    "video_data",
    "mm_hashes",
    "mm_content_hashes",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "lora_path",
    "custom_logit_processor",
    "require_reasoning",
    "return_hidden_states",
    "return_routed_experts",
    "routed_experts_start_len",
    "stream",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "external_trace_header",
    "rid",
    "session_params",
    "priority",
    "session_id",
)
KNOWN = {*POSITIONAL, *UNSUPPORTED, *GenerateInput.__struct_fields__} - {"text", "input_ids", "sampling_params"}


class Engine(EngineControl):
    """One model, ready to generate when the constructor returns.

    Options are those of ``banyan serve`` (ServerArgs), as keywords; log_level is "error" unless given. Raises StartError, with a
    child's traceback in ``detail``, when the model cannot be loaded. After the death of one of its processes every call raises
    EngineDeadError. Bad requests raise RequestError, which is a ValueError. Call ``shutdown``, or use it as a context manager.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **options: Any) -> None:
        begin = time.monotonic()
        self.server_args = server_args or ServerArgs.from_kwargs({"log_level": "error", **options})
        if self.server_args.node_rank > 0:
            raise StartError("an Engine is rank 0; start the other machines with banyan serve --node-rank.")
        self._launched = launch(self.server_args)
        self._closing = threading.Lock()
        try:
            self.tokenizer_manager = TokenizerManager(self._launched.manager_config, self._launched.info, self._launched.tokenizer)
            tracing.install(self.tokenizer_manager, self.server_args)
            self._thread = _start_loop(self.tokenizer_manager)
            self._models = ModelService(self.tokenizer_manager)
        except BaseException:
            self._launched.stop(0)
            raise
        self._supervisor = Supervisor(
            self._launched,
            self.tokenizer_manager,
            self._thread.loop,
            budget=self.server_args.restarts,
            watchdog=self.server_args.watchdog_timeout,
            give_up=self.tokenizer_manager.fail,
        )
        self._supervisor.allow()
        self._supervisor.start()
        self._at_exit = _at_exit(weakref.ref(self))
        atexit.register(self._at_exit)
        self.startup_time = time.monotonic() - begin

    # --- generation ---------------------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt = None, sampling_params: Params = None, input_ids: Ids = None, *more: Any, **named: Any
    ) -> Answer | Iterator[dict[str, Any]]:
        """Complete one prompt or a batch; blocks. The shapes are those of the native /generate.

        A dict for a single prompt with n == 1, else a list, prompt-major. With stream=True an iterator of chunks, already validated
        and started; closing or dropping it aborts the request, as Ctrl-C does.

        named: stream, rid, session_params, priority, routing_key, timeout, extra_key, cache_salt, incremental,
        return_prompt_token_ids, return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob, return_text_in_logprobs,
        custom_logit_processor, data_parallel_rank, bootstrap_room, return_hidden_states, and input_embeds in the place of a prompt:
        float [T, hidden] as lists, an array or a tensor, or a list of such. The other arguments of SGLang's generate exist, in its
        order, and must be unset.
        """
        request = _request(prompt, sampling_params, input_ids, more, named)
        if not request.stream:
            return self._thread.call(self.tokenizer_manager.generate(request))
        generation = self._thread.call(self.tokenizer_manager.start(request), Generation.abort)
        return Stream(self._thread, self.tokenizer_manager, generation, request)

    async def async_generate(
        self, prompt: Prompt = None, sampling_params: Params = None, input_ids: Ids = None, *more: Any, **named: Any
    ) -> Answer | AsyncIterator[dict[str, Any]]:
        """``generate`` on any event loop; with stream=True its result is an asynchronous iterator. Cancelling it aborts."""
        request = _request(prompt, sampling_params, input_ids, more, named)
        if not request.stream:
            return await self._thread.call_async(self.tokenizer_manager.generate(request))
        generation = await self._thread.call_async(self.tokenizer_manager.start(request), Generation.abort)
        return Stream(self._thread, self.tokenizer_manager, generation, request)

    def chat(
        self, messages: list[dict[str, Any]], sampling_params: Params = None, *, chat_template_kwargs: Any = None, **named: Any
    ) -> Answer | Iterator[dict[str, Any]]:
        """Answer a conversation: ``generate`` for what the chat template makes of it. named: as there."""
        ids = self.chat_ids(messages, chat_template_kwargs=chat_template_kwargs)
        return self.generate(None, sampling_params, ids, **named)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> int:
        """Abort the request with exactly this rid, or the ones it was expanded to, or all; says how many choices that were."""

        async def abort() -> int:
            return self.tokenizer_manager.abort(rid, abort_all)

        return self._thread.call(abort())

    # --- sessions -----------------------------------------------------------------------------------------------------------------

    def open_session(
        self, capacity_of_str_len: int, session_id: str | None = None, streaming: bool = False, timeout: float | None = None
    ) -> str:
        """Open a session and return its id.

        ``generate`` with ``session_params={"id": ..., "rid": ...}`` then takes only what is new of a conversation: the tokens of
        the turn ``rid`` come before it.
        """
        values = {"capacity_of_str_len": capacity_of_str_len, "session_id": session_id, "streaming": streaming, "timeout": timeout}
        return self._thread.call(self.tokenizer_manager.open_session(OpenSession.parse(values)))

    def close_session(self, session_id: str) -> None:
        """Forget a session, after the turns that are under way."""
        self._thread.call(self.tokenizer_manager.close_session(session_id))

    # --- control ------------------------------------------------------------------------------------------------------------------

    def flush_cache(self, timeout: float = 0.0) -> ControlReply:
        """Empty the prefix cache, waiting up to ``timeout`` seconds for idleness; ``success`` and ``message`` say how it went."""
        return self._thread.call(self.tokenizer_manager.flush_cache(timeout))

    def radix_cache(self, k: int = 10) -> dict[str, Any]:
        """As GET /radix_cache: what the prefix cache holds, and its k hottest prefixes."""
        return self._thread.call(self.tokenizer_manager.radix_cache(k))

    def explain_cache(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """As POST /radix_cache/explain: how much of one prompt would hit, and why not more. Exactly one of prompt, input_ids and
        messages (a conversation, which goes through the chat template)."""
        tm = self.tokenizer_manager
        if messages is not None and prompt is None and input_ids is None:
            text = ChatTemplate.of(tm.tokenizer, tm.config.chat_template).render(messages)
            input_ids = tm.tokenizer.encode(text, add_special_tokens=False)
        elif messages is not None:
            raise RequestError("Give one of prompt, input_ids and messages.", param="messages")
        values = {"text": prompt, "input_ids": input_ids, "extra_key": extra_key, "cache_salt": cache_salt}
        return self._thread.call(tm.explain_cache(GenerateInput.parse(values)))

    def pause_generation(self, mode: str = "abort") -> ControlReply:
        """Begin no further step; returns when none is under way. Requests that come now wait for ``continue_generation``.

        mode: "abort" ends all requests, "retract" sends those that run back to the queue and frees their KV (so that flush_cache
        works), "in_place" keeps it.
        """
        return self._thread.call(self.tokenizer_manager.pause_generation(mode))

    def continue_generation(self) -> ControlReply:
        """End a pause."""
        return self._thread.call(self.tokenizer_manager.continue_generation())

    def get_server_info(self) -> dict[str, Any]:
        """As /server_info: options, what was derived, and the scheduler's state."""
        return self._thread.call(
            info.server_info(self.tokenizer_manager, self.server_args, status="ready", startup_time=self.startup_time)
        )

    def get_model_info(self) -> dict[str, Any]:
        """As /model_info."""
        return info.model_info(self.tokenizer_manager)

    def shutdown(self) -> None:
        """Stop the processes and wait until they are reaped; calls under way raise EngineDeadError. Idempotent; run at exit."""
        if not self._launched.group.owned:  # a forked process has a copy of this object, but no part in it
            return
        with self._closing:
            if self._thread.stopped:
                return
            self._supervisor.stop()
            self._thread.post(self.tokenizer_manager.begin_shutdown)
            self._launched.stop(STOP_TIMEOUT)
            self._thread.call(self.tokenizer_manager.close())
            self._thread.stop()
            atexit.unregister(self._at_exit)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _start_loop(tm: TokenizerManager) -> LoopThread:
    async def start() -> None:
        tm.start_loop()

    thread = LoopThread()
    try:
        thread.call(start())
    except BaseException:
        thread.stop()
        raise
    return thread


def _at_exit(engine: weakref.ref[Engine]) -> Callable[[], None]:
    def shutdown() -> None:
        alive = engine()
        if alive is not None:
            alive.shutdown()

    return shutdown


def _lists(value: Any) -> Any:
    """Arrays and tensors as lists, also within a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_lists(item) for item in value] if isinstance(value, list | tuple) and any(map(_is_array, value)) else value


def _is_array(value: Any) -> bool:
    return hasattr(value, "tolist")


def _request(prompt: Prompt, params: Params, input_ids: Any, more: tuple[Any, ...], named: dict[str, Any]) -> GenerateInput:
    """The arguments of generate as a request. Raises TypeError for a name that no generate has, RequestError for a bad value."""
    if len(more) > len(POSITIONAL):
        raise TypeError(f"generate takes at most {3 + len(POSITIONAL)} positional arguments")
    values = dict(zip(POSITIONAL, more, strict=False))
    for name in named:
        if name not in KNOWN or name in values:
            raise TypeError(f"generate got {'an unexpected' if name not in KNOWN else 'twice the'} argument {name!r}")
    values |= named
    if "input_embeds" in values:
        values["input_embeds"] = _lists(values["input_embeds"])
    input_ids = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
    return GenerateInput.parse({**values, "text": prompt, "sampling_params": params, "input_ids": input_ids})
