"""GrammarCompiler: compiled grammars for the tokenizer manager, from a cache or from worker processes.

A worker that does not answer in time, dies or grows too large is killed and replaced; only the request whose grammar did that is
refused. Workers start with the first grammar and stay. Thread-safe.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from ..errors import RequestError
from .grammar import BACKENDS, GrammarText, is_installed
from .worker import EXIT_MEMORY, LENGTH, Job, Result, WorkerConfig, write_frame

log = logging.getLogger(__name__)

START_TIMEOUT = 120.0  # seconds until a worker is ready
GRACE = 1.0  # seconds: the worker's own alarm comes first
MAX_DATA = 64 << 20  # bytes of one compiled grammar: the scheduler must load it
OVERHEAD = 512  # bytes that a cache entry counts besides its text and data


class Compiled(msgspec.Struct, frozen=True):
    """key names it towards the scheduler; data is for the backend's ``load``."""

    key: str
    backend: str
    data: bytes


class GrammarCompiler:
    """``compile`` returns at once; what it returns ends with a Compiled or a RequestError."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        preferred: str = "xgrammar",
        num_workers: int = 2,
        max_cache_bytes: int = 256 << 20,
        max_waiting: int = 64,
    ) -> None:
        self._config = config
        self._backends = sorted(filter(is_installed, BACKENDS), key=lambda name: name != preferred)
        self._max_waiting = max_waiting
        self._cache = _Cache(max_cache_bytes)
        self._pending: dict[GrammarText, Future[Compiled]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="grammar")
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._closed = False

    def compile(self, grammar: GrammarText) -> Future[Compiled]:
        """Requests for the same grammar share one compilation."""
        with self._lock:
            future = self._cache.get(grammar) or self._pending.get(grammar)
            if future is not None:
                return future
            if len(self._pending) >= self._max_waiting or self._closed:
                raise RequestError(
                    "Too many grammars wait to be compiled.",
                    param=grammar.kind,
                    status_code=503,
                    err_type="ServiceUnavailableError",
                )
            future = self._pending[grammar] = self._pool.submit(self._compile, grammar)
        future.add_done_callback(lambda done: self._take(grammar, done))
        return future

    def close(self) -> None:
        """Kill the workers; what waits ends with an error. Idempotent."""
        with self._lock:
            self._closed = True
            workers, idle = list(self._all), list(self._idle)
            self._idle.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        for worker in idle:  # of the others, the threads that use them see the end
            self._drop(worker)

    def _take(self, grammar: GrammarText, done: Future[Compiled]) -> None:
        with self._lock:
            self._pending.pop(grammar, None)
            error = None if done.cancelled() else done.exception()
            if not done.cancelled() and not isinstance(error, WorkerLost):
                self._cache.put(grammar, done)

    def _compile(self, grammar: GrammarText) -> Compiled:
        """On a thread of the pool."""
        worker = self._worker()
        try:
            result = worker.call(Job(grammar, self._backends), timeout=self._config.timeout + GRACE)
        except WorkerLost as error:
            self._drop(worker)
            raise WorkerLost(f"{grammar.kind}: {error.message}", param=grammar.kind) from None
        with self._lock:
            closed = self._closed
            if not closed:
                self._idle.append(worker)
        if closed:
            self._drop(worker)
        if result.error:
            raise RequestError(result.error, param=result.param)
        if len(result.data) > MAX_DATA:
            raise RequestError(f"{grammar.kind}: compiles to {len(result.data)} bytes; at most {MAX_DATA}.", param=grammar.kind)
        digest = hashlib.sha256(msgspec.msgpack.encode(grammar)).hexdigest()
        return Compiled(key=digest, backend=result.backend, data=result.data)

    def _worker(self) -> Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._closed:
                raise WorkerLost("the server is shutting down.")
            worker = Worker()
            self._all.add(worker)
        try:
            worker.start(self._config)
        except WorkerLost as error:
            self._drop(worker)
            raise RequestError(f"The grammar worker does not start: {error.message}", status_code=500) from None
        return worker

    def _drop(self, worker: Worker) -> None:
        worker.kill()
        worker.release()
        with self._lock:
            self._all.discard(worker)


class WorkerLost(RequestError):
    """The worker is gone or must go; says why. Not cached: another try may succeed."""


class Worker:
    """One process, used by one thread at a time; ``kill`` is for any thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: a file in the user's working directory must not shadow a module
            [sys.executable, "-P", "-m", "banyan.managers.constrained.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, config: WorkerConfig) -> None:
        """Configure it and wait until it is ready. Raises WorkerLost."""
        self._send(config)
        if not self._receive(START_TIMEOUT).ready:
            raise WorkerLost("it speaks another language.")

    def call(self, job: Job, *, timeout: float) -> Result:
        """Have one job done. Raises WorkerLost when it takes too long or the process ends."""
        self._send(job)
        return self._receive(timeout)

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self._process.kill()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.wait()

    def release(self) -> None:
        """Close what is left of it, when no thread reads from it any more. Idempotent."""
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, message: msgspec.Struct) -> None:
        if self._process.stdin is None:
            raise WorkerLost("it has no stdin.")
        with contextlib.suppress(OSError):  # gone: reading tells why
            write_frame(self._process.stdin, message)

    def _receive(self, timeout: float) -> Result:
        deadline = time.monotonic() + timeout
        size = LENGTH.unpack(self._read(LENGTH.size, deadline))[0]
        return msgspec.msgpack.decode(self._read(size, deadline), type=Result)

    def _read(self, size: int, deadline: float) -> bytes:
        if self._process.stdout is None:
            raise WorkerLost("it has no stdout.")
        fd, chunks = self._process.stdout.fileno(), bytearray()
        while len(chunks) < size:
            readable, _, _ = select.select([fd], [], [], max(deadline - time.monotonic(), 0.0))
            if not readable:
                raise WorkerLost("cannot be compiled within the time limit.")
            data = os.read(fd, min(size - len(chunks), 1 << 20))
            if not data:
                raise WorkerLost(self._cause())
            chunks += data
        return bytes(chunks)

    def _cause(self) -> str:
        status = self._process.wait()
        log.warning("a grammar worker ended with status %d", status)
        if status == -signal.SIGALRM:
            return "cannot be compiled within the time limit."
        if status in (EXIT_MEMORY, -signal.SIGABRT, -signal.SIGKILL):
            return "cannot be compiled within the memory limit."
        return f"the grammar compiler does not survive it (status {status})."


class _Cache:
    """The newest results whose sizes sum up to at most max_bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[GrammarText, tuple[Future[Compiled], int]] = OrderedDict()

    def get(self, grammar: GrammarText) -> Future[Compiled] | None:
        if grammar not in self._entries:
            return None
        self._entries.move_to_end(grammar)
        return self._entries[grammar][0]

    def put(self, grammar: GrammarText, done: Future[Compiled]) -> None:
        size = len(grammar.text) * 4 + OVERHEAD + (0 if done.exception() else len(done.result().data))
        if grammar in self._entries or size > self._max_bytes:
            return
        self._entries[grammar] = done, size
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._num_bytes -= freed

    def __len__(self) -> int:
        return len(self._entries)
