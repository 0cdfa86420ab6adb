"""The FastAPI app, and uvicorn to serve it on a socket that was bound (``listen``) before any model was loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from ..version import __version__
from . import (
    cache_api,
    http_errors,
    loads_api,
    metrics,
    native_api,
    openapi,
    ops_api,
    parse_api,
    score_api,
    session_api,
    template_api,
    tokens_api,
    weights_api,
)
from .auth import Door
from .head_limit import HeadLimitProtocol
from .http_metrics import HttpMetrics
from .openai import routes
from .overload_gate import OverloadGate
from .routes import ROUTES
from .server_args import ServerArgs
from .server_state import ServerState

KEEP_ALIVE_SECONDS = 5
BACKLOG = 2048
PROBE_PATHS = ("/health", "/livez", "/readyz", "/startupz", "/metrics")


def create_app(state: ServerState) -> FastAPI:
    """The app. It answers 503 until ``state.tm`` is set."""
    app = FastAPI(title="Banyan", version=__version__)
    app.state.server = state
    http_errors.install(app)
    app.add_middleware(OverloadGate, state=state)
    app.add_middleware(Door, api_key=state.args.api_key, admin_api_key=state.args.admin_api_key)
    # Any web page may call the server, but none with a user's cookies.
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    added = (native_api, session_api, cache_api, template_api, tokens_api, parse_api, score_api, loads_api, ops_api, weights_api)
    for api in (*added, routes):
        api.install(app)
    if state.args.enable_metrics:
        metrics.install(app, state)
    openapi.install(app)
    app.add_middleware(HttpMetrics, counts=state.http_counts, routes=frozenset(ROUTES))
    return app


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: the command line decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, *, at_once: bool = False) -> None:
        """Stop accepting; wait for open responses, or not."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once


class _NoProbes(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """uvicorn's access records carry (client, method, path, version, status)."""
        arguments = record.args
        return not (isinstance(arguments, tuple) and len(arguments) > 2 and str(arguments[2]).startswith(PROBE_PATHS))


def make_server(app: FastAPI, args: ServerArgs, drain_seconds: int) -> HttpServer:
    """A server for ``await server.serve(sockets=[listen.bind(...)])``."""
    level = (args.log_level_http or "warning").upper()
    logging.getLogger("uvicorn").setLevel(level)
    access = logging.getLogger("uvicorn.access")
    access.setLevel(level)
    access.addFilter(_NoProbes())
    config = uvicorn.Config(
        app,
        loop="none",
        http=HeadLimitProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=access.isEnabledFor(logging.INFO),
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
    )
    return HttpServer(config)
