"""Files of recorded turns: written while the scheduler runs, or when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from ..config import SchedulerConfig, SchedulerInfo
from ..errors import StartError
from ..faults import Faults
from ..invariants import MemoryBreach
from .log import FORMAT, Disguise, Header, NoDisguise, Turn, TurnSink

logger = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 18


class Subject:
    """The scheduler that is recorded, as the header of a file describes it."""

    def __init__(self, config: SchedulerConfig, info: SchedulerInfo, eos_mask: np.ndarray, faults: Faults) -> None:
        self.config = config
        self._info = info
        self._eos_ids = np.flatnonzero(eos_mask)
        self._faults = faults

    def disguise(self) -> Disguise:
        """A fresh one, or none if the user wants the prompts."""
        return NoDisguise() if self.config.record_prompts else Disguise(self._info.model.vocab_size)

    def header(self, disguise: Disguise, *, first_turn: int = 0, crash: str | None = None) -> Header:
        model = msgspec.structs.replace(self._info.model, eos_token_ids=[], bos_token_id=None)
        return Header(
            format=FORMAT,
            config=self.config,
            info=msgspec.structs.replace(self._info, model=model),
            eos_ids=sorted(disguise.ids(self._eos_ids).tolist()),
            faults=self._faults.values,
            first_turn=first_turn,
            crash=crash,
        )


class NoFile(TurnSink):
    """Nothing is written."""


class DecisionFile(TurnSink):
    """Appends each turn to a file, which only its owner may read; buffered, and flushed when nothing happens.

    A file that cannot be written to any more (a full disk) ends the recording, not the scheduler.
    """

    def __init__(self, path: str, subject: Subject) -> None:
        self._path = path
        self._disguise = subject.disguise()
        self._encoder = msgspec.json.Encoder()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise StartError(f"--record-decisions: cannot write {path}: {error.strerror}") from None
        self._file = open(fd, "wb", buffering=BUFFER_BYTES)  # noqa: SIM115  closed by close
        self._write(self._encoder.encode(subject.header(self._disguise)))
        self.flush()

    def put(self, turn: Turn) -> None:
        if not self._file.closed:
            self._write(self._encoder.encode(turn.record(self._disguise)))

    def flush(self) -> None:
        with self._stop_on_error():
            if not self._file.closed:
                self._file.flush()

    def close(self) -> None:
        with self._stop_on_error():
            self._file.close()

    def _write(self, line: bytes) -> None:
        with self._stop_on_error():
            self._file.write(line + b"\n")

    @contextlib.contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.error("recording to %s ends: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()


def last_turns(subject: Subject, turns: Iterable[Turn]) -> list[str]:
    """The lines of a record of these turns."""
    turns, disguise = list(turns), subject.disguise()
    header = subject.header(disguise, first_turn=turns[0].number if turns else 0)
    return [line.decode() for line in _lines(header, turns, disguise)]


def _lines(header: Header, turns: list[Turn], disguise: Disguise) -> list[bytes]:
    return [msgspec.json.encode(item) for item in (header, *(turn.record(disguise) for turn in turns))]


def write_crash(folder: str, subject: Subject, turns: Iterable[Turn], error: BaseException) -> Path | None:
    """Write the last turns before ``error`` to banyan-crash-<pid>.jsonl in ``folder``; its path, None if that failed too."""
    turns = list(turns)
    disguise = subject.disguise()
    path = Path(folder) / f"banyan-crash-{os.getpid()}.jsonl"
    header = subject.header(
        disguise, first_turn=turns[0].number if turns else 0, crash=_described(error, full=subject.config.record_prompts)
    )
    lines = _lines(header, turns, disguise)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(b"\n".join(lines) + b"\n")
    except OSError as failure:
        logger.error("the crash dump %s could not be written: %s", path, failure.strerror)
        return None
    logger.error("the last %d turns are in %s", len(turns), path)
    return path


def _described(error: BaseException, *, full: bool) -> str:
    """The error's type and where it came from. Its message may quote a prompt, so only our own breaches show theirs."""
    text = f"{type(error).__name__}: {error}" if full or isinstance(error, MemoryBreach) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return text + "".join(f"\n  {Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames)
