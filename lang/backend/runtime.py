"""Runtime: a server that a program starts for itself."""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Self

from ...managers.errors import StartError
from ..errors import BackendError
from ..ir import SamplingParams
from ..transcript import Prompt
from .runtime_endpoint import RuntimeEndpoint

POLL_SECONDS = 0.2
STOP_SECONDS = 15.0
FIRST_PORT, LAST_PORT = 30000, 40000


class Runtime:
    """``banyan serve`` as a child process, on a free port; ``endpoint`` is its backend. Options are those of the command.

    Raises StartError if the server ends, or does not serve within launch_timeout seconds. Call ``shutdown``, or use it as a context
    manager; at exit it is called for you.
    """

    def __init__(self, log_level: str = "error", launch_timeout: float = 300.0, **options: Any) -> None:
        port = options.pop("port", None) or _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "banyan", "serve", "--port", str(port), "--log-level", log_level]
        self._process = subprocess.Popen([*command, *_flags(options)])
        atexit.register(self.shutdown)
        try:
            self.endpoint = self._wait(time.monotonic() + launch_timeout)
        except BaseException:
            self.shutdown()
            raise

    def _wait(self, end: float) -> RuntimeEndpoint:
        while self._process.poll() is None:
            with contextlib.suppress(BackendError):
                endpoint = RuntimeEndpoint(self.url)
                if endpoint.get_server_info().get("status") == "ready":
                    return endpoint
            if time.monotonic() > end:
                raise StartError("the server did not come up in time")
            time.sleep(POLL_SECONDS)
        raise StartError(f"the server ended with status {self._process.returncode} while starting; its log says why")

    def shutdown(self) -> None:
        """Stop the server and wait for it. Idempotent."""
        atexit.unregister(self.shutdown)
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def cache_prefix(self, prefix: str) -> None:
        """Have the text in the prefix cache."""
        self.endpoint.cache_prefix(prefix)

    def generate(
        self,
        prompt: str | list[str],
        sampling_params: dict[str, Any] | None = None,
        return_logprob: Any = False,
        logprob_start_len: Any = None,
        top_logprobs_num: Any = None,
    ) -> str:
        """The answer of /generate as JSON text."""
        body = {
            "text": prompt,
            "sampling_params": sampling_params or {},
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
        }
        return json.dumps(self.endpoint.post({name: value for name, value in body.items() if value is not None}))

    async def async_generate(self, prompt: str, sampling_params: dict[str, Any] | None = None) -> AsyncIterator[str]:
        """The text in pieces as they come."""
        import asyncio

        params = SamplingParams(**_renamed(sampling_params or {}))
        pieces = self.endpoint.generate_stream(Prompt(prompt, [], None, ()), params)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            if piece.text:
                yield piece.text

    add_request = async_generate


def _renamed(params: dict[str, Any]) -> dict[str, Any]:
    return {"seed" if name == "sampling_seed" else name: value for name, value in params.items()}


def _flags(options: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


def _free_port() -> int:
    for port in range(FIRST_PORT, LAST_PORT):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StartError(f"no port between {FIRST_PORT} and {LAST_PORT} is free")
