"""What a client asks for (GenerateInput) and the handle on its answer (Generation), free of HTTP and of sockets."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .errors import RequestError
from .io_struct import (
    CacheHint,
    FinishReason,
    GenerateReq,
    HiddenWish,
    LogprobParams,
    RowHidden,
    RowLogprobs,
    TextOutput,
    unpack_ids,
)
from .sessions.sessions import SessionParams

if TYPE_CHECKING:
    from .request_plan import RequestPlan

# Fields of SGLang's /generate and Engine.generate that are not served; a value that is falsy means "off" in all of them.
UNSUPPORTED = (
    "image_data",
    "audio_data",
    "video_data",
    "mm_hashes",
    "mm_content_hashes",
    "lora_path",
    "return_routed_experts",
    "return_sampling_mask",
    "disagg_prefill_dp_rank",
)


T = TypeVar("T")

LARGE_BYTES = 16 << 10  # of 32-bit numbers; writing them takes about ten milliseconds


class GenerateInput(msgspec.Struct, kw_only=True):
    """One call of generate as it came in: one prompt or a batch, not yet checked beyond its types.

    Exactly one of text, input_ids and input_embeds. A single ``rid`` on a batch or with n > 1 becomes ``rid_0``,
    ``rid_1``, ...; lists have one entry per prompt.
    """

    text: str | list[str] | None = None
    input_ids: Sequence[int | Sequence[int]] | None = None
    input_embeds: list[Any] | None = None  # float [T, hidden], or a list of such prompts
    continuations: list[str | list[int]] | None = None  # of the one prompt; the answer has one item for each
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    rid: str | list[str] | None = None
    stream: bool = False
    incremental: bool | None = None  # stream only what is new; None: as the server is configured
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    cache_hint: CacheHint | None = None
    priority: int | None = None  # counts with priority scheduling only
    routing_key: str | None = None
    data_parallel_rank: int | None = None  # the replica that computes it; None: as the load balancer says
    routed_dp_rank: int | None = None  # another name of it
    bootstrap_host: str | list[str] | None = None  # these three are what a gateway tells engines that share a request;
    bootstrap_port: int | list[int | None] | None = None  # the room also says which replica gets it, where
    bootstrap_room: int | list[int] | None = None  # --load-balance-method follow_bootstrap_room; of a batch: room, room + 1, ...
    timeout: float | None = None  # seconds until the request ends wherever it is
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] | None = None  # -1, the default: none of the prompt
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool = False
    custom_logit_processor: str | list[str] | None = None  # name of a class that the server was started with
    require_reasoning: bool = False  # the output may have a thinking part; a grammar begins behind it
    max_thinking_tokens: int | None = None  # most tokens of the thinking part; then its end mark is forced
    return_prompt_token_ids: bool = False
    return_hidden_states: HiddenWish | list[HiddenWish] = False
    session_params: SessionParams | None = None
    session_id: str | None = None  # names a conversation towards routers; not together with session_params

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> GenerateInput:
        """Build it from decoded JSON or keyword arguments.

        Nulls mean the default and unknown names are ignored, as clients of SGLang rely on. Raises RequestError for a wrong type and
        for a known field that is not served.
        """
        given = {key: value for key, value in values.items() if value is not None}
        for name in UNSUPPORTED:
            if given.get(name):
                raise RequestError(f"{name} is not supported.", param=name)
        try:
            return msgspec.convert(given, cls, strict=True)
        except msgspec.ValidationError as error:
            path = str(error).partition("`$.")[2]
            raise RequestError(str(error), param=path.split("`")[0].split("[")[0] or None) from None


class Output(msgspec.Struct, kw_only=True):
    """What is new of one choice. The counts are totals; the Output with a finish_reason is the last of its choice."""

    index: int  # prompt * n + sample
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    logprobs: RowLogprobs | None = None
    hidden: RowHidden | None = None
    e2e_latency: float | None = None  # seconds from start to the finishing row, None before
    first_token_latency: float | None = None  # seconds from start to the first token, None before
    phases: dict[str, float] = {}  # seconds by phase, with the finishing row

    @property
    def is_large(self) -> bool:
        """It holds so many numbers that writing them would keep the event loop from others."""
        row, hidden = self.logprobs, self.hidden
        columns = [] if row is None else [each for each in (row.input, row.output) if each is not None]
        size = sum(len(each.values) + len(each.top_values) + len(each.id_values) for each in columns)
        return size + (len(hidden.values) if hidden is not None else 0) > LARGE_BYTES

    def merge(self, later: Output) -> None:
        """Append what came later for the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs = self.logprobs.merged(later.logprobs) if self.logprobs else later.logprobs
        self.hidden = self.hidden.merged(later.hidden) if self.hidden else later.hidden
        self.finish_reason = later.finish_reason
        self.prompt_tokens = later.prompt_tokens
        self.completion_tokens = later.completion_tokens
        self.cached_tokens = later.cached_tokens
        self.num_retractions = later.num_retractions
        self.e2e_latency = later.e2e_latency
        self.first_token_latency = later.first_token_latency or self.first_token_latency
        self.phases = later.phases


def unstarted_output(index: int, prompt_tokens: int, reason: FinishReason) -> Output:
    """Of a choice that ended before anything was computed for it."""
    return Output(
        index=index,
        text="",
        token_ids=[],
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=0,
        cached_tokens=0,
        num_retractions=0,
    )


async def written(write: Callable[[Output], T], output: Output) -> T:
    """``write(output)``, beside the event loop if it is large. Nobody else may change what ``write`` changes meanwhile."""
    return await asyncio.to_thread(write, output) if output.is_large else write(output)


def output_of_row(rows: TextOutput, row: int, *, index: int, token_ids: list[int]) -> Output:
    """One row of a message as the news of the choice ``index``, without what travels with some rows only."""
    return Output(
        index=index,
        text=rows.texts[row],
        token_ids=token_ids,
        finish_reason=rows.finish_reasons[row],
        prompt_tokens=rows.prompt_tokens[row],
        completion_tokens=rows.completion_tokens[row],
        cached_tokens=rows.cached_tokens[row],
        num_retractions=rows.num_retractions[row],
    )


class Generation:
    """The answer to one GenerateInput as it comes in. Use it on one event loop only.

    ``async for output in generation`` gives the choices' deltas in order of arrival; what queued up for one choice while the
    consumer was slow is one Output. Leaving the loop early, closing its iterator or cancelling its task aborts what has not
    finished. Whoever drops a Generation without iterating it must call ``abort``.
    """

    def __init__(self, rids: list[str], *, num_prompts: int, n: int, single: bool, abort: Callable[[list[str]], None]) -> None:
        self.rids = rids
        self.packed_prompts: list[bytes] = []  # per output index, as pack_ids made them
        self.logprobs: list[LogprobParams | None] = [None] * len(rids)  # per output index
        self.followers: dict[str, list[str]] = {}  # rids that are not computed themselves, and those that tell of them
        self.n = n
        self.num_prompts = num_prompts
        self.is_single = single and n == 1
        self.created = time.monotonic()
        self._abort = abort
        self._aborted = False
        self._live = set(range(len(rids)))
        self._pending: dict[int, Output] = {}
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids of the prompt of each output index."""
        unpacked: dict[bytes, list[int]] = {}
        for packed in self.packed_prompts:
            if packed not in unpacked:
                unpacked[packed] = unpack_ids(packed).tolist()
        return [unpacked[packed] for packed in self.packed_prompts]

    def begin(self, plan: RequestPlan, messages: list[GenerateReq]) -> list[GenerateReq]:
        """The prompts are known, a message per output index; returns what is to be computed (called by the tokenizer manager)."""
        self.packed_prompts = [message.input_ids for message in messages]
        self.logprobs = [message.logprobs for message in messages]
        return messages

    @property
    def finished(self) -> bool:
        """True when no more output will arrive."""
        return not self._live

    def push(self, output: Output) -> None:
        """Take in a delta (called by the tokenizer manager)."""
        if output.index not in self._live:
            return
        if output.finish_reason is not None:
            output.e2e_latency = time.monotonic() - self.created
            self._live.discard(output.index)
        queued = self._pending.get(output.index)
        if queued is None:
            self._pending[output.index] = output
        else:
            queued.merge(output)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End with an exception, which the consumer gets after what is queued (called by the tokenizer manager)."""
        self._error = error
        self._live.clear()
        self._wake.set()

    def abort(self) -> None:
        """Abort the choices that have not finished; each still gets its finishing Output. Idempotent."""
        if self._live and not self._aborted:
            self._aborted = True
            self._abort([self.rids[index] for index in sorted(self._live)])

    async def __aiter__(self) -> AsyncGenerator[Output, None]:
        try:
            while True:
                while self._pending:
                    yield self._pending.pop(next(iter(self._pending)))
                if self._error is not None:
                    raise self._error
                if not self._live:
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            self.abort()
