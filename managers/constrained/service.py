"""GrammarService: what the tokenizer manager does for requests with a grammar, before the scheduler hears of them.

A grammar is checked and compiled by a worker process, then loaded by the scheduler, which says when it has; only then is the
request sent. So the scheduler never waits for a grammar. Which grammars it keeps is decided here: messages on one link keep their
order.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from ..config import SchedulerInfo, TokenizerManagerConfig
from ..control_calls import ControlCalls
from ..errors import RequestError
from ..io_struct import DropGrammarReq, GenerateReq, LoadGrammarReq, Message
from ..request_stats import RequestStats
from ..sampling_params import GRAMMAR_FIELDS
from .compiler import Compiled, GrammarCompiler
from .grammar import BACKENDS, GrammarText, stop_ids_of
from .worker import WorkerConfig

NO_TEXT: dict[str, None] = dict.fromkeys(GRAMMAR_FIELDS)


class GrammarService:
    """On the tokenizer manager's loop."""

    def __init__(
        self,
        config: TokenizerManagerConfig,
        info: SchedulerInfo,
        *,
        tokenizer_stop_ids: tuple[int, ...],
        calls: ControlCalls,
        send: Callable[[Message], None],
        stats: RequestStats,
    ) -> None:
        """tokenizer_stop_ids: what ends a text by the tokenizer's own account."""
        self._config = config
        self._vocab_size = info.model.vocab_size
        self._stop_ids = stop_ids_of(info.model, tokenizer_stop_ids)
        self._calls = calls
        self._send = send
        self._stats = stats
        self.num_waiting = 0  # requests whose grammar is being compiled or loaded
        self._compiler: GrammarCompiler | None = None
        self._loaded: OrderedDict[str, int] = OrderedDict()  # key -> bytes, the newest use last
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._texts: dict[str, tuple[str, str]] = {}  # of what was loaded, by key

    async def attach(self, messages: list[GenerateReq]) -> None:
        """Put the key of its loaded grammar into each message that has one, and take its text out.

        The messages must be sent before the loop does anything else. Raises RequestError for a grammar that cannot be served.
        """
        texts = {message.rid: text for message in messages if (text := message.sampling_params.grammar()) is not None}
        if not texts:
            return
        self.num_waiting += len(texts)
        try:
            compiled = {text: await self._compile(text) for text in dict.fromkeys(texts.values())}
            self._texts |= {each.key: text for text, each in compiled.items()}
            while missing := [each for each in compiled.values() if each.key not in self._loaded]:
                await self._load(missing[0])
        finally:
            self.num_waiting -= len(texts)
        for message in messages:
            if message.rid in texts:
                key = message.grammar_key = compiled[texts[message.rid]].key
                message.sampling_params = msgspec.structs.replace(message.sampling_params, **NO_TEXT)
                self._loaded.move_to_end(key)
        self._drop_oldest(keep={each.key for each in compiled.values()})

    def close(self) -> None:
        """Kill the workers. Idempotent."""
        if self._compiler is not None:
            self._compiler.close()

    async def _compile(self, text: tuple[str, str]) -> Compiled:
        if self._config.grammar_backend not in BACKENDS:
            raise RequestError(f"{text[0]}: grammars are switched off on this server.", param=text[0])
        if self._compiler is None:
            worker = WorkerConfig(
                tokenizer_path=self._config.tokenizer_path,
                vocab_size=self._vocab_size,
                stop_ids=self._stop_ids,
                timeout=self._config.grammar_compile_timeout,
                memory=self._config.grammar_compile_memory,
            )
            self._compiler = GrammarCompiler(
                worker, preferred=self._config.grammar_backend, max_cache_bytes=self._config.grammar_cache_bytes
            )
        begin, future = time.monotonic(), self._compiler.compile(GrammarText(*text))
        was_known, failed = future.done(), True
        try:
            # shielded: another request may wait for the same grammar
            compiled = await asyncio.shield(asyncio.wrap_future(future))
            failed = False
            return compiled
        finally:
            seconds = time.monotonic() - begin
            timed_out = failed and seconds >= self._config.grammar_compile_timeout
            self._stats.grammar(None if was_known else seconds, failed=failed, timed_out=timed_out)

    async def _load(self, compiled: Compiled) -> None:
        if compiled.key not in self._loading:
            task = asyncio.get_running_loop().create_task(self._load_now(compiled))
            self._loading[compiled.key] = task
            task.add_done_callback(lambda _: self._loading.pop(compiled.key, None))
        await asyncio.shield(self._loading[compiled.key])

    async def _load_now(self, compiled: Compiled) -> None:
        reply = await self._calls.call(
            lambda call_id: LoadGrammarReq(call_id=call_id, key=compiled.key, backend=compiled.backend, data=compiled.data)
        )
        if not reply.success:
            self._send(DropGrammarReq(key=compiled.key))
            message = f"The grammar could not be loaded: {reply.message}"
            raise RequestError(message, status_code=500, err_type="InternalServerError")
        self._loaded[compiled.key] = len(compiled.data)

    def forget(self) -> None:
        """The scheduler died with all that it had loaded."""
        self._loaded.clear()

    async def reload(self, key: str) -> None:
        """Load a grammar that an earlier scheduler had. Raises RequestError."""
        if key not in self._loaded:
            await self._load(await self._compile(self._texts[key]))

    def _drop_oldest(self, *, keep: set[str]) -> None:
        for key in [key for key in self._loaded if key not in keep]:
            if sum(self._loaded.values()) <= self._config.grammar_cache_bytes:
                return
            del self._loaded[key]
            self._texts.pop(key, None)
            self._send(DropGrammarReq(key=key))
