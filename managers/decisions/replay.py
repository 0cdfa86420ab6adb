"""Replay: the recorded turns of a scheduler, taken again by the same scheduler, without a model, and compared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from ...model_executor.step import GroupSpec, ModelInfo, ProfileSpec, StepHandle, StepInput, StepOutput, TensorSpec
from ..control import Control
from ..errors import BanyanError
from ..event_loop import EventLoop, make_loop
from ..faults import Faults
from ..io_struct import GenerateReq, ToScheduler
from ..scheduler import Scheduler
from ..scheduler_process import build_memory, build_scheduler
from .log import FORMAT, STOP_STRING, Header, NoDisguise, Recorder, Turn, TurnRecord, TurnSink

COMPARED = ("batch", "ids", "error", "finished", "retracted")


class RecordError(BanyanError):
    """A file cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the replay does not do what was recorded. turn counts from 0."""

    turn: int
    what: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        shown = [msgspec.json.encode(side).decode() for side in (self.recorded, self.replayed)]
        return f"turn {self.turn} differs in {self.what}:\n  recorded: {shown[0]}\n  replayed: {shown[1]}"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """num_turns were checked up to the difference, if there is one. note: what else the reader should know."""

    num_turns: int
    difference: Difference | None
    note: str = ""


def read_record(path: str) -> tuple[Header, Iterator[TurnRecord]]:
    """The parts of a recorded file; the turns are read as they are consumed. Raises RecordError.

    A last line that was cut off, as by the death of the process, is ignored.
    """
    try:
        with Path(path).open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    try:
        header = msgspec.json.decode(line, type=Header)
    except msgspec.DecodeError as error:
        raise RecordError(f"{path} is no record of decisions: {error}") from None
    if header.format != FORMAT:
        raise RecordError(f"{path} has format {header.format}; this version reads {FORMAT}")
    return header, _read_turns(path)


def _read_turns(path: str) -> Iterator[TurnRecord]:
    decoder = msgspec.json.Decoder(TurnRecord)
    with Path(path).open("rb") as file:
        file.readline()
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise RecordError(f"{path}, line {number}: {error}") from None


def replay(path: str) -> ReplayResult:
    """Run the scheduler of a file over its turns up to the first difference. Raises RecordError."""
    header, turns = read_record(path)
    if header.first_turn:
        raise RecordError(f"{path} begins with turn {header.first_turn} and not with the first: it can be read, but not replayed")
    package = logging.getLogger("banyan.managers")
    level = package.level
    package.setLevel(logging.CRITICAL)  # what is logged was logged when it was recorded
    try:
        return _Replay(header).run(turns)
    finally:
        package.setLevel(level)


class _RecordedRunner:
    """A Runner whose results are those of the current turn of the record."""

    def __init__(self, info: ModelInfo, num_slots: int) -> None:
        self.info = info
        self.turn = TurnRecord(turn=0)
        self._num_slots = num_slots

    def max_cache_tokens(self) -> int:
        return self._num_slots

    def init_cache(self, num_slots: int, req_to_token: np.ndarray) -> None:
        """No KV is kept."""

    def launch(self, step: StepInput) -> StepHandle:
        return _RecordedHandle(self, len(step.sample_index))

    def update_weights(self, path: str, load_format: str, *, partial: bool) -> None:
        """There are no weights."""

    def join_group(self, spec: GroupSpec) -> None:
        """No trainer takes part."""

    def leave_group(self, name: str) -> None:
        """There is none."""

    def receive_weights(self, group: str, tensors: Sequence[TensorSpec], folder: str) -> str:
        """Weights do not matter."""
        return folder

    def read_weight(self, name: str, limit: int) -> list[float]:
        raise ValueError("there are no weights")

    def release_memory(self, tags: list[str]) -> None:
        """There is no memory to free."""

    def resume_memory(self, tags: list[str]) -> None:
        """There is no memory to allocate."""

    def start_profile(self, spec: ProfileSpec) -> None:
        raise ValueError("nothing runs that could be profiled")

    def stop_profile(self) -> str:
        raise ValueError("no profile is under way")

    def close(self) -> None:
        """Nothing to stop."""


class _RecordedHandle:
    def __init__(self, runner: _RecordedRunner, num_samples: int) -> None:
        self._runner = runner
        self._num_samples = num_samples

    def done(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        """The recorded results; others in their place if they do not fit the step, which is a difference then."""
        turn = self._runner.turn
        if turn.error is not None:
            raise type(turn.error, (RuntimeError,), {})
        ids = turn.ids if turn.ids is not None and len(turn.ids) == self._num_samples else [-1] * self._num_samples
        return StepOutput(next_ids=np.array(ids, np.int64))


class _RecordedStops:
    """A StopChecker for a request whose stop strings are not known: the record says when one was found."""

    def __init__(self, rid: str, runner: _RecordedRunner) -> None:
        self._rid = rid
        self._runner = runner

    def push(self, token_id: int) -> str | None:
        found = any(rid == self._rid and kind == STOP_STRING for rid, kind, _ in self._runner.turn.finished)
        return "?" if found else None


class _RecordedConstraint:
    """A constraint for a request whose grammar is not known: the record says when the request ended."""

    failed = False
    stop_ids = ()
    has_grammar = True

    def __init__(self, rid: str, runner: _RecordedRunner) -> None:
        self._rid = rid
        self._runner = runner
        self._ended = ""

    @property
    def is_complete(self) -> bool:
        return self._ended == "stop"

    def accept(self, token_id: int) -> None:
        self._ended = next((kind for rid, kind, _ in self._runner.turn.finished if rid == self._rid), "")

    def fill(self, row: np.ndarray, *, may_stop: bool) -> None:
        """A grammar that left nothing ended its request at this place."""
        dead = any(rid == self._rid and kind == "abort" for rid, kind, _ in self._runner.turn.finished)
        row[:] = 0 if dead else -1

    def jump(self, context: list[int]) -> list[int]:
        return next((ids for rid, ids in self._runner.turn.jumps if rid == self._rid), [])


@dataclass(slots=True)
class _TurnsOver(TurnSink):
    """Keeps the turns that are over."""

    turns: list[Turn] = field(default_factory=list)

    def put(self, turn: Turn) -> None:
        self.turns.append(turn)


class _NoReceiver:
    """In the place of a socket on which nothing arrives."""

    def wait(self, timeout: float) -> bool:
        return False

    def take(self, own: Callable[[], list[ToScheduler]]) -> list[ToScheduler]:
        return own()


class _ReplayRecorder(Recorder):
    """Gives the loop the recorded messages, and requests their recorded stops."""

    def __init__(self, scheduler: Scheduler, sink: TurnSink, runner: _RecordedRunner) -> None:
        super().__init__(scheduler, sink, ring_turns=1)
        self._runner = runner
        self._stops: list[str] = []
        self._grammars: list[str] = []

    def take(self, messages: list[ToScheduler]) -> list[ToScheduler]:
        recorded = self._runner.turn.messages
        super().take(recorded)
        return [self._without_stops(message) for message in recorded]

    def _without_stops(self, message: ToScheduler) -> ToScheduler:
        if isinstance(message, GenerateReq) and message.grammar_key:
            self._grammars.append(message.rid)
            message = msgspec.structs.replace(message, grammar_key="")
        if not isinstance(message, GenerateReq) or not message.sampling_params.stop:
            return message
        self._stops.append(message.rid)
        return msgspec.structs.replace(message, sampling_params=msgspec.structs.replace(message.sampling_params, stop=[]))

    def next_batch(self, *, in_flight: bool) -> Any:
        for rid in self._stops:
            req: Any = self._scheduler.live.get(rid)
            if req is not None:
                req.stop_checker = _RecordedStops(rid, self._runner)
        for rid in self._grammars:
            constrained: Any = self._scheduler.live.get(rid)
            if constrained is not None:
                constrained.constraint = _RecordedConstraint(rid, self._runner)
        self._stops, self._grammars = [], []
        return super().next_batch(in_flight=in_flight)


class _Replay:
    """A scheduler built as the recorded one was."""

    def __init__(self, header: Header) -> None:
        info = header.info
        self._runner = _RecordedRunner(msgspec.structs.replace(info.model, eos_token_ids=header.eos_ids), info.max_total_num_tokens)
        self._crash = header.crash
        self._over = _TurnsOver()
        tokenizer: Any = SimpleNamespace(eos_token_ids=[])
        found, memory = build_memory(header.config, self._runner, tokenizer)
        scheduler = build_scheduler(header.config, found, memory, self._runner, self._sent)
        scheduler.faults = Faults(dict(header.faults))
        self._recorder = _ReplayRecorder(scheduler, self._over, self._runner)
        receiver: Any = _NoReceiver()
        control = Control(scheduler, receiver, lambda reply: None, tokenizer, header.config, tap=self._recorder.take)
        self._loop: EventLoop = make_loop(self._recorder, control.receive, overlap=found.overlap, model=found.model)

    def _sent(self, output: Any) -> None:
        self._recorder.sent(output)

    def run(self, records: Iterator[TurnRecord]) -> ReplayResult:
        """Each turn is compared when the next one begins: until then things may happen that belong to it."""
        before: TurnRecord | None = None
        number = 0
        for number, record in enumerate(records):
            if (result := self._turn(number, record, before)) is not None:
                return result
            before = record
        num_turns = number if before is None else number + 1
        if self._crash is not None:  # a turn that died before it took messages in has left no record
            result = self._turn(num_turns, TurnRecord(turn=num_turns), before)
            return result or ReplayResult(num_turns, None, f"The recorded process died here, the replay does not: {self._crash}")
        self._recorder.end_turn()
        return ReplayResult(num_turns, self._compare(before) if before else None)

    def _turn(self, number: int, record: TurnRecord, before: TurnRecord | None) -> ReplayResult | None:
        """Take a turn and check the one before; the result if that is the end."""
        self._runner.turn = record
        died: Exception | None = None
        try:
            self._loop.turn()
        except Exception as error:
            died = error
        if before is not None and (died is None or self._over.turns):
            difference = self._compare(before)
            if difference is not None:
                return ReplayResult(number, difference)
        return None if died is None else self._died(number, died)

    def _compare(self, record: TurnRecord) -> Difference | None:
        if not self._over.turns:
            return Difference(record.turn, "what happened", "something", "nothing")
        replayed = self._over.turns.pop(0).record(NoDisguise())
        for name in COMPARED:
            ours, theirs = getattr(replayed, name), getattr(record, name)
            if ours != theirs:
                return _within(record.turn, name, theirs, ours)
        return None

    def _died(self, turn: int, error: Exception) -> ReplayResult:
        kind = type(error).__name__
        recorded = (self._crash or "went on").split("\n")[0]
        if recorded.partition(":")[0] == kind:
            return ReplayResult(turn, None, f"The recorded process died here, and so does the replay: {kind}: {error}")
        return ReplayResult(turn, Difference(turn, "how it ended", recorded, f"{kind}: {error}"))


def _within(turn: int, name: str, recorded: Any, replayed: Any) -> Difference:
    """Of two different batches only the first field that differs is shown."""
    if name == "batch" and recorded is not None and replayed is not None:
        for field_name in type(recorded).__struct_fields__:
            sides = getattr(recorded, field_name), getattr(replayed, field_name)
            if sides[0] != sides[1]:
                return Difference(turn, f"{name}.{field_name}", *sides)
    return Difference(turn, name, recorded, replayed)
