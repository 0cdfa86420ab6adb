"""Every message between the processes, defined once.

Token ids travel as the bytes of little-endian int32 arrays; outputs of a step travel by column. ``managers.ipc`` encodes and
decodes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ..model_executor.step import GroupSpec, ProfileSpec, TensorSpec
from .constrained.thinking import ThinkingParams
from .sampling_params import SamplingParams


def pack_ids(ids: np.ndarray | list[int]) -> bytes:
    """Token ids as the bytes of an int32 array."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """The read-only int32 array that pack_ids made."""
    return np.frombuffer(data, dtype="<i4")


class Message(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """Base of all messages."""


class FinishReason(msgspec.Struct, array_like=True, kw_only=True):
    """Why a request ended.

    kind: "stop" (matched is the stop token id or the stop string), "length", or "abort" (message, status_code and err_type say
    more). pinned_tokens: prompt tokens that its cache_hint pinned, None if it asked for no pin.
    """

    kind: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None
    pinned_tokens: int | None = None


class CacheHint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long and how dearly the cache should keep the KV of a request's prompt.

    pin_seconds: from its end on it is not evicted for so long, if the budget for pins has room. priority: with the eviction policy
    "priority", lower ones go first.
    """

    pin_seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    priority: Annotated[int, Meta(ge=0, le=1000)] = 0


class LogprobParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Which log-probabilities a request wants besides those of its output tokens.

    start_len: first prompt position, the prompt's length for none. top_num: alternatives per position. token_ids: ids whose
    log-probability is told at every position. after_prompt: also at the position after the prompt, as the last one of the prompt;
    no token is there, so only token_ids mean something. For prompts without output.
    """

    start_len: int
    top_num: int = 0
    token_ids: list[int] = []
    after_prompt: bool = False


class LogprobColumns(msgspec.Struct, array_like=True, kw_only=True):
    """Log-probabilities of K consecutive tokens as bytes: float32 [K], [K, top_num] with int32 ids, and [K, len(token_ids)]."""

    values: bytes = b""
    top_values: bytes = b""
    top_ids: bytes = b""
    id_values: bytes = b""

    def __add__(self, later: LogprobColumns) -> LogprobColumns:
        return LogprobColumns(
            values=self.values + later.values,
            top_values=self.top_values + later.top_values,
            top_ids=self.top_ids + later.top_ids,
            id_values=self.id_values + later.id_values,
        )


class RowLogprobs(msgspec.Struct, array_like=True, kw_only=True):
    """Of one row of output. output: of its new tokens. input: of the prompt from max(start_len, 1) on, with the first row only, and
    of the position after it where that was asked for."""

    output: LogprobColumns
    input: LogprobColumns | None = None

    def merged(self, later: RowLogprobs | None) -> RowLogprobs:
        """This row and a later one of the same request."""
        if later is None:
            return self
        return RowLogprobs(output=self.output + later.output, input=self.input if self.input is not None else later.input)


HiddenWish = bool | Literal["last"]  # all states of a request, none, or the newest alone


class RowHidden(msgspec.Struct, array_like=True, kw_only=True):
    """Hidden states of ``num`` consecutive positions of one request from ``first`` on: float32 [num, H] as bytes.

    newest: only the newest state is wanted, so a later row takes the place of this one.
    """

    first: int
    num: int
    values: bytes
    newest: bool = False

    def merged(self, later: RowHidden | None) -> RowHidden:
        """These states and those of a later row of the same request."""
        if later is None:
            return self
        if later.newest:
            return later if later.num else self
        return RowHidden(first=self.first, num=self.num + later.num, values=self.values + later.values)


# --- tokenizer manager -> scheduler -----------------------------------------------------------------------------------------------


class GenerateReq(Message):
    """One prompt, validated and tokenised. Every rid gets exactly one finishing row in a TokenOutput."""

    rid: str
    input_ids: bytes
    sampling_params: SamplingParams
    stream: bool = False
    extra_key: str = ""
    cache_salt: str = ""
    priority: int | None = None
    cache_hint: CacheHint | None = None
    routing_key: str = ""
    data_parallel_rank: int | None = None  # for the controller of replicas, as is the next one
    bootstrap_room: int | None = None
    bad_word_ids: list[list[int]] = []  # the token sequences of sampling_params.bad_words
    logit_processor: str = ""
    logprobs: LogprobParams | None = None
    grammar_key: str = ""  # of a grammar that was loaded before
    thinking: ThinkingParams | None = None  # its output may have a thinking part, behind which the grammar begins
    session_hold: str = ""  # keep its KV for this streaming session when it ends by itself
    timeout: float | None = None  # seconds from its arrival at the scheduler
    probe: bool = False  # leaves nothing in the cache
    input_embeds: bytes = b""  # float32 [T, H], the prompt; input_ids are zeros then
    embeds_key: str = ""  # digest of input_embeds
    return_hidden_states: HiddenWish = False


class LoadGrammarReq(Message):
    """Load a compiled grammar; answered when requests may name its key."""

    call_id: int
    key: str
    backend: str
    data: bytes


class DropGrammarReq(Message):
    """No later request names this key, unless it is loaded again."""

    key: str


class ReleaseHoldReq(Message):
    """A streaming session ended: what it holds of the cache may go."""

    session: str


class AbortReq(Message):
    """Abort the request with exactly this rid, wherever it is; all of them with abort_all."""

    rid: str = ""
    abort_all: bool = False


class FlushCacheReq(Message):
    """Empty the prefix cache as soon as nothing runs or waits; answered then, or with a failure after ``timeout`` seconds."""

    call_id: int
    timeout: float = 0.0


class PauseReq(Message):
    """Begin no further step; answered when none is under way.

    mode says what becomes of the requests: "abort" ends them, "retract" sends those that run back to the queue, "in_place" leaves
    them with their KV.
    """

    call_id: int
    mode: str


class ContinueReq(Message):
    """End a pause."""

    call_id: int


class UpdateWeightsReq(Message):
    """Load other weights between two steps: a checkpoint, or (partial) only the tensors in the folder's model.safetensors.

    Answered when it is done. Until then no request is admitted; it begins when none runs any more, or during a pause.
    weight_version None: it stays. An empty path: only the version changes. group: receive these tensors there, as a partial update
    in a folder below path.
    """

    call_id: int
    path: str
    load_format: str = "auto"
    partial: bool = False
    flush_cache: bool = True
    abort_all: bool = False
    weight_version: str | None = None
    group: str = ""
    tensors: list[TensorSpec] = []


class WeightsGroupReq(Message):
    """Join a group of a trainer, or (spec None) leave the one of this name; answered when that is done or has failed."""

    call_id: int
    name: str
    spec: GroupSpec | None = None


class ReadWeightReq(Message):
    """Ask for the first values of a tensor."""

    call_id: int
    name: str
    limit: int


class MemoryReq(Message):
    """Give the memory of "weights" or "kv_cache" back to the system, or take it again."""

    call_id: int
    release: bool
    tags: list[str]


class ProfileReq(Message):
    """Start a profile of the forward steps, or (spec None) stop it; the answer's message is then the path of the trace."""

    call_id: int
    spec: ProfileSpec | None = None


class InternalStateReq(Message):
    """Ask for the scheduler's state (loads, memory, derived arguments)."""

    call_id: int


class LastTurnsReq(Message):
    """Ask for the records of the loop's last turns, as a crash dump has them: ``turns`` of the reply's state."""

    call_id: int


class CacheReportReq(Message):
    """Ask what the prefix cache holds: sizes, counters and its k hottest prefixes."""

    call_id: int
    k: int = 10


class ExplainCacheReq(Message):
    """Ask what of this prompt the prefix cache holds, and why not more."""

    call_id: int
    input_ids: bytes
    extra_key: str = ""
    cache_salt: str = ""


class SetPace(Message):
    """Made by rank 0 for itself: from now on at most so many prompt tokens in a step in which requests decode."""

    chunk: int


class ShutdownReq(Message):
    """Leave the loop and exit with status 0."""


class Tick(Message):
    """The time, in seconds since the scheduler process started. Rank 0 puts it in front of the messages that it takes in."""

    now: float


# --- scheduler -> tokenizer manager -----------------------------------------------------------------------------------------------


class ControlReply(Message):
    """Answer to the control message that carried call_id."""

    call_id: int
    success: bool = True
    message: str = ""
    state: dict[str, Any] = {}


class Heartbeat(Message):
    """Sent by each scheduler once a second.

    loop_age: seconds since its loop last turned; forward_age: seconds that the forward pass under way has taken, 0 if none is.
    replicas: those of which this is the sum, by number, if a controller of replicas sends it.
    """

    loop_age: float
    forward_age: float
    num_running: int
    num_waiting: int
    num_used_tokens: int = 0  # of the KV cache, by requests
    gen_throughput: float = 0.0  # output tokens per second
    cache_hit_rate: float = 0.0  # share of the prompt tokens of all admitted requests that the cache had
    replicas: dict[int, Heartbeat] = {}


class Ended(Message):
    """To the controller of replicas: these requests have ended."""

    rids: list[str]


class SchedulerReport(Message):
    """What a scheduler tells about once a second, by the name of the metric; counters are totals since its start."""

    gauges: dict[str, float]
    counters: dict[str, float]


# --- scheduler -> detokenizer -> tokenizer manager --------------------------------------------------------------------------------


class DecodeOptions(msgspec.Struct, array_like=True, kw_only=True):
    """How the text of one request is made from its ids; travels with its first row of output."""

    stop: list[str] = []
    stop_regex: list[str] = []
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False


class Timings(msgspec.Struct, array_like=True, kw_only=True):
    """When a request was taken in by the scheduler, was first seated, and got its first token: seconds on the machine's monotonic
    clock. Travels with its first row of output; no decision depends on it."""

    received: float
    seated: float
    sampled: float


class OutputColumns(Message):
    """Columns that a row of output has on both legs of its way; all lists have one entry per row.

    token_ids holds the new ids of all rows one after the other, num_ids says how many each row has (maybe 0).
    completion_tokens counts all output tokens so far. A row whose finish_reason is set is the last of its rid.
    """

    rids: list[str]
    token_ids: bytes
    num_ids: list[int]
    finish_reasons: list[FinishReason | None]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    num_retractions: list[int]
    logprobs: list[tuple[int, RowLogprobs]] = []  # (row, its own) of those that want any
    hidden: list[tuple[int, RowHidden]] = []  # likewise
    timings: list[tuple[int, Timings]] = []  # (row, its own) of those that appear for the first time


class TokenOutput(OutputColumns):
    """Scheduler to detokenizer. ``options`` has (row, options) for each rid that appears for the first time."""

    options: list[tuple[int, DecodeOptions]] = []


class TextOutput(OutputColumns):
    """Detokenizer to tokenizer manager: the same rows with the text that may be shown now (a delta, maybe empty)."""

    texts: list[str] = []


ToScheduler = (
    GenerateReq
    | LoadGrammarReq
    | DropGrammarReq
    | ReleaseHoldReq
    | AbortReq
    | FlushCacheReq
    | PauseReq
    | ContinueReq
    | UpdateWeightsReq
    | WeightsGroupReq
    | ReadWeightReq
    | MemoryReq
    | ProfileReq
    | InternalStateReq
    | LastTurnsReq
    | CacheReportReq
    | ExplainCacheReq
    | ShutdownReq
    | SetPace
    | Tick
)
ToDetokenizer = TokenOutput | ShutdownReq
ToTokenizer = TextOutput | ControlReply | Heartbeat | SchedulerReport
ToController = ControlReply | Heartbeat | SchedulerReport | Ended
