"""What the scheduler did, turn by turn: the messages that it took in, the step it decided on, the results that it was given.

A Recorder stands between a loop and its scheduler. It always keeps the last turns in memory, for a crash dump, and writes all of
them if a file is given. A decision depends on nothing but what is recorded, so ``replay`` can take each of them again.

The files are JSON lines: a Header, then TurnRecords. Unless prompts are wanted in it, a file holds no text and no true token id:
a Disguise renames the requests and puts other ids in the place of the true ones, the same for equal ids, end tokens included.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from ...model_executor.step import StepHandle, StepOutput
from ..config import SchedulerConfig, SchedulerInfo
from ..io_struct import (
    AbortReq,
    CacheReportReq,
    DropGrammarReq,
    ExplainCacheReq,
    GenerateReq,
    LastTurnsReq,
    LoadGrammarReq,
    LogprobParams,
    ProfileReq,
    ReadWeightReq,
    ReleaseHoldReq,
    Tick,
    TokenOutput,
    ToScheduler,
    UpdateWeightsReq,
    WeightsGroupReq,
    pack_ids,
    unpack_ids,
)
from ..sampling_params import SamplingParams
from ..schedule_batch import ScheduleBatch
from ..scheduler import Scheduler

FORMAT = 1
RING_TURNS = 200
STOP_STRING = "stop_string"  # kind of a finish by one of the request's stop strings
QUESTIONS = (
    CacheReportReq,
    ExplainCacheReq,
    LastTurnsReq,
    ReadWeightReq,
    ProfileReq,
    WeightsGroupReq,
)  # change nothing, so are not recorded


class BatchRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A step: its ForwardMode, and per row the tokens that have their KV already and those computed now ([]: one each).

    requests: of the rows that are prefilled, which come first. slots: checksum of the slots of all computed tokens.
    """

    mode: int
    rows: list[int]
    prefix_lens: list[int]
    extend_lens: list[int] = []
    requests: list[str] = []
    num_samples: int
    slots: int


class TurnRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A turn of the loop. batch: the step launched. ids or error: the results taken in (of the step before, in the overlap loop).

    finished: request, kind of finish, output tokens. retracted: the waiting requests that were ever retracted and how often, in
    turns that retract. jumps: what grammars forced in this turn, request and tokens.
    """

    turn: int
    messages: list[ToScheduler] = []
    batch: BatchRecord | None = None
    ids: list[int] | None = None
    error: str | None = None
    finished: list[tuple[str, str, int]] = []
    retracted: list[tuple[str, int]] = []
    jumps: list[tuple[str, list[int]]] = []


class Header(msgspec.Struct, kw_only=True):
    """First line of a file. eos_ids as the file disguises them; first_turn is 0 if the file can be replayed.

    crash: what the process died of, in the file that is written then.
    """

    format: int
    config: SchedulerConfig
    info: SchedulerInfo
    eos_ids: list[int]
    faults: dict[str, float] = {}
    first_turn: int = 0
    crash: str | None = None


class Disguise:
    """Other names and token ids in the place of the true ones. The key is drawn anew for each file and kept nowhere."""

    def __init__(self, vocab_size: int) -> None:
        self._key = os.urandom(32)
        seed = np.random.SeedSequence(int.from_bytes(os.urandom(32), "little"))
        self._permutation = np.random.default_rng(seed).permutation(vocab_size).astype(np.int64)

    def ids(self, ids: np.ndarray) -> np.ndarray:
        """A bijection of the vocabulary; negative ids mean something else and stay."""
        return np.where(ids < 0, ids, self._permutation[np.maximum(ids, 0)])

    def name(self, name: str) -> str:
        return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._key, digest_size=8).hexdigest() if name else ""


class NoDisguise(Disguise):
    """Names and ids as they are, for a file that may hold the prompts."""

    def __init__(self) -> None:
        """There is nothing to draw."""

    def ids(self, ids: np.ndarray) -> np.ndarray:
        return ids

    def name(self, name: str) -> str:
        return name


class StepSeen(NamedTuple):
    """What is kept of a step: not its token ids. slots: checksum of the slots of the computed tokens."""

    mode: int
    num_prefill: int
    num_samples: int
    slots: int
    rows: np.ndarray
    seq_lens: np.ndarray
    extend_lens: np.ndarray

    @classmethod
    def of(cls, batch: ScheduleBatch) -> StepSeen:
        step = batch.step
        slots = zlib.crc32(step.out_cache_loc.tobytes())
        return cls(int(step.mode), batch.num_prefill, len(step.sample_index), slots, step.rows, step.seq_lens, step.extend_lens)


@dataclass(slots=True)
class Turn:
    """A turn as it was seen: no array in it is written to afterwards."""

    number: int
    messages: list[ToScheduler]
    batch: StepSeen | None = None
    requests: list[str] = field(default_factory=list)
    ids: np.ndarray | None = None
    owned: np.ndarray | None = None  # of each of the ids: its row has not changed hands since the launch
    error: str | None = None
    finished: list[tuple[str, str, int]] = field(default_factory=list)
    retracted: list[tuple[str, int]] = field(default_factory=list)
    jumps: list[tuple[str, list[int]]] = field(default_factory=list)

    @property
    def is_quiet(self) -> bool:
        """Nothing happened but that time went by."""
        happened = self.batch or self.ids is not None or self.error or self.finished or self.retracted
        return not happened and all(isinstance(message, (Tick, *QUESTIONS)) for message in self.messages)

    def record(self, disguise: Disguise) -> TurnRecord:
        """The turn in a file's terms."""
        name = disguise.name
        return TurnRecord(
            turn=self.number,
            messages=[disguised(message, disguise) for message in self.messages if not isinstance(message, QUESTIONS)],
            batch=self._batch_record(disguise),
            ids=None if self.ids is None else disguise.ids(self.ids).tolist(),
            error=self.error,
            finished=[(name(rid), kind, num_tokens) for rid, kind, num_tokens in self.finished],
            retracted=[(name(rid), count) for rid, count in self.retracted],
            jumps=[(name(rid), disguise.ids(np.array(ids)).tolist()) for rid, ids in self.jumps],
        )

    def _batch_record(self, disguise: Disguise) -> BatchRecord | None:
        step = self.batch
        if step is None:
            return None
        return BatchRecord(
            mode=step.mode,
            rows=step.rows.tolist(),
            prefix_lens=(step.seq_lens - step.extend_lens).tolist(),
            extend_lens=step.extend_lens.tolist() if step.num_prefill or (step.extend_lens > 1).any() else [],
            requests=[disguise.name(rid) for rid in self.requests],
            num_samples=step.num_samples,
            slots=step.slots,
        )


def disguised(message: ToScheduler, disguise: Disguise) -> ToScheduler:
    """A message with all that a decision may depend on, and nothing else of what a client sent."""
    name = disguise.name
    if isinstance(message, GenerateReq):
        return GenerateReq(
            rid=name(message.rid),
            input_ids=pack_ids(disguise.ids(unpack_ids(message.input_ids))),
            sampling_params=_disguised_params(message.sampling_params, disguise),
            extra_key=name(message.extra_key),
            cache_salt=name(message.cache_salt),
            priority=message.priority,
            cache_hint=message.cache_hint,
            routing_key=name(message.routing_key),
            session_hold=name(message.session_hold),
            grammar_key="?" if _is_bound(message) else "",
            logprobs=_asked(message.logprobs) if message.logprobs else None,
            timeout=message.timeout,
            probe=message.probe,
            embeds_key=name(message.embeds_key),
            return_hidden_states=message.return_hidden_states,
        )
    if isinstance(message, AbortReq):
        return AbortReq(rid=name(message.rid), abort_all=message.abort_all)
    if isinstance(message, UpdateWeightsReq):
        return msgspec.structs.replace(message, path="?", group="", tensors=[])
    if isinstance(message, ReleaseHoldReq):
        return ReleaseHoldReq(session=name(message.session))
    if isinstance(message, LoadGrammarReq | DropGrammarReq):  # a grammar only changes the sampled ids
        return DropGrammarReq(key="")
    return message


def _asked(params: LogprobParams) -> LogprobParams:
    return LogprobParams(start_len=params.start_len, after_prompt=params.after_prompt)


def _is_bound(message: GenerateReq) -> bool:
    """A mask says what it may sample: that matters only for the moments at which it ends, which are recorded."""
    budget = message.thinking.budget if message.thinking else None
    return bool(message.grammar_key) or budget is not None


def _disguised_params(params: SamplingParams, disguise: Disguise) -> SamplingParams:
    """Without what only changes the sampled ids, which are recorded. Stop strings and patterns become a placeholder: that one was
    found is told by the turn's ``finished``."""
    return SamplingParams(
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        stop=["?"] if params.stop or params.stop_regex else [],
        stop_token_ids=disguise.ids(np.array(params.stop_token_ids, np.int64)).tolist() if params.stop_token_ids else [],
        ignore_eos=params.ignore_eos,
    )


def _light(message: ToScheduler) -> ToScheduler:
    """A message as it may stay in memory: a compiled grammar can have a hundred megabytes, and no record has it."""
    return DropGrammarReq(key="") if isinstance(message, LoadGrammarReq) else message


class TurnSink:
    """Where a Recorder puts the turns that are over."""

    def put(self, turn: Turn) -> None:
        """Take a turn."""

    def flush(self) -> None:
        """Nothing more will come for a while."""

    def close(self) -> None:
        """Nothing more will come."""


class _TappedHandle:
    """A StepHandle that notes its results."""

    def __init__(self, handle: StepHandle, turn: Turn) -> None:
        self._handle = handle
        self._turn = turn

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> StepOutput:
        try:
            output = self._handle.wait()
        except Exception as error:
            self._turn.error = type(error).__name__
            raise
        self._turn.ids = output.next_ids
        return output


class Recorder:
    """A scheduler towards the loop. ``take`` sees the messages of each turn, ``sent`` the output, the three verbs the rest.

    Of turns without a message in which there is nothing to do only the first in a row is kept, and the time of the last.
    """

    def __init__(self, scheduler: Scheduler, sink: TurnSink, *, ring_turns: int = RING_TURNS, compares: bool = False) -> None:
        """compares: note which of the sampled ids still have an owner."""
        self.ring: deque[Turn] = deque(maxlen=ring_turns)
        self.num_turns = 0
        self._scheduler = scheduler
        self._compares = compares
        self._sink = sink
        self._turn = Turn(0, [])
        self._num_retracted = 0
        self._was_quiet = True  # before the first turn
        self._skipped: list[ToScheduler] = []  # the newest tick of a turn that was not kept: time went on

    def take(self, messages: list[ToScheduler]) -> list[ToScheduler]:
        """A turn begins with these messages, which are handed through."""
        self.end_turn()
        self._turn = Turn(self.num_turns, [_light(message) for message in messages])
        return messages

    def end_turn(self) -> None:
        """What happened up to now belongs to the turn that is over."""
        turn = self._turn
        turn.jumps = self._scheduler.masks.take_jumps()
        retracted = self._scheduler.stats.num_retracted
        if retracted != self._num_retracted:
            self._num_retracted = retracted
            turn.retracted = [(req.rid, req.num_retractions) for req in self._scheduler.waiting if req.num_retractions]
        quiet = turn.is_quiet and self._scheduler.is_resting()  # else it was decided not to begin a step
        if quiet and self._was_quiet:
            ticks: list[ToScheduler] = [message for message in turn.messages if isinstance(message, Tick)]
            self._skipped = ticks[-1:] or self._skipped
        else:
            turn.messages = [*self._skipped, *turn.messages]
            self._skipped = []
            self.ring.append(turn)
            self.num_turns += 1
            self._sink.put(turn)
        if quiet and not self._was_quiet:
            self._sink.flush()
        self._was_quiet = quiet
        self._turn = Turn(self.num_turns, [])

    def sent(self, output: TokenOutput) -> None:
        """Note who finished."""
        reasons = output.finish_reasons
        if reasons.count(None) == len(reasons):
            return
        for rid, reason, num_tokens in zip(output.rids, reasons, output.completion_tokens, strict=True):
            if reason is not None:
                kind = STOP_STRING if isinstance(reason.matched, str) else reason.kind
                self._turn.finished.append((rid, kind, num_tokens))

    def next_batch(self, *, in_flight: bool) -> ScheduleBatch | None:
        batch = self._scheduler.next_batch(in_flight=in_flight)
        if batch:
            self._turn.batch = StepSeen.of(batch)
            table = self._scheduler.memory.table
            self._turn.requests = [table.req(row).rid for row in batch.rows[: batch.num_prefill].tolist()]
        return batch

    def launch(self, batch: ScheduleBatch) -> StepHandle:
        return self._scheduler.launch(batch)

    def absorb(self, batch: ScheduleBatch, handle: StepHandle) -> None:
        if self._compares:
            index = batch.step.sample_index
            self._turn.owned = (self._scheduler.memory.table.epochs[batch.rows] == batch.epochs)[index]
        self._scheduler.absorb(batch, _TappedHandle(handle, self._turn))

    def give_up(self, batch: ScheduleBatch) -> None:
        self._scheduler.give_up(batch)

    def close(self) -> None:
        """The last turn is over, and no other comes."""
        self.end_turn()
        self._sink.close()
