"""The process that compiles grammars: one at a time, under limits of time and memory that the kernel enforces.

``python -m banyan.managers.constrained.worker`` reads its config and then jobs from stdin, and writes a result for each to stdout.
Frames are four bytes of length and msgpack. Native code that never returns, eats the memory or crashes ends this process, and only
it; grammar_compiler starts another one. The end of stdin ends it, and so does the alarm when its parent died while it compiled.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from typing import IO

import msgspec

from ..errors import BanyanError
from ..tokenizer import Tokenizer
from .grammar import GrammarBackend, GrammarText, Vocabulary, create_backend
from .schema_check import candidates

LENGTH = struct.Struct("<I")
NICENESS = 10  # serving goes first
EXIT_MEMORY = 4


class WorkerConfig(msgspec.Struct, kw_only=True):
    """What a worker is started with. timeout in seconds and memory in bytes are for one job."""

    tokenizer_path: str
    vocab_size: int
    stop_ids: tuple[int, ...]
    timeout: float
    memory: int
    fault: str = ""  # for tests: "raise", "hang" or "crash" while compiling


class Job(msgspec.Struct, array_like=True):
    """One grammar to compile. backends: those that may be tried, the preferred one first."""

    grammar: GrammarText
    backends: list[str]


class Result(msgspec.Struct, array_like=True):
    """data for the backend, or the reason why there is none. ready: what a worker says once, before its first job."""

    backend: str = ""
    data: bytes = b""
    error: str = ""
    param: str | None = None
    ready: bool = False


def write_frame(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Send a message. Raises OSError when the reader is gone."""
    data = msgspec.msgpack.encode(message)
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next message, None at the end."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    data = pipe.read(size)
    return data if len(data) == size else None


def main() -> None:
    """Entry of the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills, even when native code runs
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    pipe_in, pipe_out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the frames
    data = read_frame(pipe_in)
    if data is None:
        return
    config = msgspec.msgpack.decode(data, type=WorkerConfig)
    tokenizer = Tokenizer.load(config.tokenizer_path, encoder=False)
    vocabulary = Vocabulary.of(tokenizer, vocab_size=config.vocab_size, stop_ids=config.stop_ids)
    compiler = _Compiler(vocabulary, config.fault)
    write_frame(pipe_out, Result(ready=True))
    while (data := read_frame(pipe_in)) is not None:
        job = msgspec.msgpack.decode(data, type=Job)
        _limit_memory(config.memory)
        signal.setitimer(signal.ITIMER_REAL, config.timeout)
        result = compiler.compile(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(pipe_out, result)


class _Compiler:
    """The backends, each made when it is first needed."""

    def __init__(self, vocabulary: Vocabulary, fault: str) -> None:
        self._vocabulary, self._fault = vocabulary, fault
        self._backends: dict[str, GrammarBackend] = {}

    def compile(self, job: Job) -> Result:
        """Try one backend after the other; the first complaint is the answer when all refuse."""
        _break(self._fault)
        kind, text = job.grammar.kind, job.grammar.text
        first: Result | None = None
        try:
            for candidate in candidates(kind, text, preferred=job.backends[0], installed=job.backends):
                try:
                    return Result(backend=candidate.backend, data=self._backend(candidate.backend).compile(kind, candidate.text))
                except BanyanError as error:
                    reason = "; ".join([*candidate.refused, f"{candidate.backend}: {error}"])
                    first = first or Result(error=f"{kind}: {reason}", param=kind)
        except BanyanError as error:
            return Result(error=str(error), param=kind)
        except MemoryError:
            os._exit(EXIT_MEMORY)  # what is left of the heap is not to be trusted
        return first or Result(error=f"{kind}: no grammar backend supports it.", param=kind)

    def _backend(self, name: str) -> GrammarBackend:
        if name not in self._backends:
            self._backends[name] = create_backend(name, self._vocabulary)
        return self._backends[name]


def _break(fault: str) -> None:
    if fault == "raise":
        raise RuntimeError("BANYAN_FAULTS: a grammar worker raises")
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    while fault == "hang":
        signal.pause()


def _limit_memory(num_bytes: int) -> None:
    """Let the process grow by so much from where it is now."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + num_bytes if hard == resource.RLIM_INFINITY else min(used + num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
