"""Load on a server over HTTP: throughput and latency as clients see them.

    python benchmarks/bench_serving.py                                        # starts a server with the default model
    python benchmarks/bench_serving.py --workload shared-prefix -- --page-size 16
    python benchmarks/bench_serving.py --base-url http://127.0.0.1:8000 --backend openai --vocab-size 49152

What follows ``--`` are options of the server that is started. Without --request-rate all sessions arrive at once; with
--max-concurrency the next one starts when another ends (closed loop); with both, arrivals wait for their turn. docs/performance.md
says what each number means. Exit status 1: the server did not start or no request completed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import httpx
import uvloop
import workloads
from http_load import Backend, Client, NativeBackend, OpenAIBackend, Run, run_sessions
from report import environment, publish
from server_process import ServerError, running_server
from serving_report import HEAD, rows, summarize

WARM_UP_SEED = 1 << 31  # added to the seed: prompts of the warm-up are none of the measured ones
DEFAULT_MODEL = "smollm2"
DEFAULT_CONCURRENCY = 8  # where neither a rate nor a concurrency is given


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", help="a running server; without it one is started")
    server.add_argument("--model-path", help=f"model of the server that is started (default: {DEFAULT_MODEL})")
    server.add_argument("--start-timeout", type=float, default=600.0, help="seconds that it may take to start (default: 600)")
    server.add_argument("--backend", choices=["native", "openai"], default="native", help="/generate or /v1/completions")
    server.add_argument("--model", help="name of the model in OpenAI requests (default: the first of /v1/models)")
    server.add_argument("--vocab-size", type=workloads.positive, help="prompts are ids below it (default: what /model_info says)")
    server.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="HTTP header of every request; repeatable"
    )
    workloads.add_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=_rate, help="sessions per second, Poisson (open loop); inf: all at once")
    load.add_argument(
        "--max-concurrency",
        type=workloads.positive,
        help=f"most sessions at a time (closed loop; default: no limit with --request-rate, else {DEFAULT_CONCURRENCY})",
    )
    load.add_argument("--warmup", type=int, default=1, help="sessions before the measured ones (default: 1)")
    load.add_argument("--timeout", type=float, default=600.0, help="seconds that one request may take (default: 600)")
    load.add_argument("--no-ignore-eos", action="store_true", help="let outputs end at the end-of-sequence token")
    load.add_argument("--no-flush", action="store_true", help="keep what the prefix cache of the server holds")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    return parser


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, options of the server)."""
    own, server_options = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, server_options = own[:at], own[at + 1 :]
    parser = make_parser()
    args = parser.parse_args(own)
    workloads.complete(parser, args)
    if args.base_url is not None and (server_options or args.model_path is not None):
        parser.error("--base-url names a running server: --model-path and options after -- are for one that is started")
    if any("=" not in header for header in args.header):
        parser.error("--header is NAME=VALUE")
    if args.request_rate is None and args.max_concurrency is None:
        args.max_concurrency = DEFAULT_CONCURRENCY
    return args, server_options


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args, server_options = parse(sys.argv[1:] if argv is None else argv)
    facts = environment()
    try:
        with contextlib.ExitStack() as stack:
            url = args.base_url
            if url is None:
                model = args.model_path or DEFAULT_MODEL
                url = stack.enter_context(running_server(model, server_options, start_timeout=args.start_timeout))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                server, flushed, run = runner.run(measure(args, url.rstrip("/")))
    except (ServerError, httpx.HTTPError) as error:
        print(f"bench_serving: error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    summary = summarize(run)
    setting = {
        **workloads.settings(args),
        "backend": args.backend,
        **_load(args),
        "cache flushed before": flushed,
        **_brief(server),
    }
    publish({"benchmark": "serving", "environment": facts, "setting": setting, "server": server, "results": summary}, HEAD,
            rows(summary), args.json)  # fmt: skip
    for kind, message in summary["error_examples"].items():
        print(f"failed: {kind}: {message}", file=sys.stderr)
    return 0 if summary["completed"] else 1


def _load(args: argparse.Namespace) -> dict[str, Any]:
    rate = "all at once" if args.request_rate in (None, float("inf")) else args.request_rate
    limit = args.max_concurrency or "none"
    return {"request rate": rate, "max concurrency": limit, "ignore_eos": str(not args.no_ignore_eos)}


def _brief(server: dict[str, Any]) -> dict[str, str | int]:
    """What a reader of the table must know of the server, as far as it tells."""
    info = server.get("scheduler_info") or {}
    model = info.get("model") or {}
    shown = {
        "model": server.get("model_path"),
        "server version": server.get("version"),
        **{name: model.get(name) for name in ("dtype", "device", "attention_backend")},
        **{
            name: info.get(name)
            for name in ("page_size", "overlap", "chunked_prefill_size", "max_running_requests", "max_total_num_tokens")
        },
    }
    return {name: str(value) for name, value in shown.items() if value is not None}


# --- against the server -----------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace, url: str) -> tuple[dict[str, Any], str, Run]:
    """(what /server_info says, whether the cache was flushed, the run)."""
    headers = dict(header.split("=", 1) for header in args.header)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        server = await _get(http, "/server_info")
        vocab_size = args.vocab_size or (await _get(http, "/model_info")).get("vocab_size")
        if not vocab_size:
            raise ServerError("the server does not tell its vocabulary's size: give --vocab-size")
        needs_ids = args.workload == "multi-turn"
        backend = await _backend(http, args, needs_ids=needs_ids)
        client = Client(url, backend, headers=headers, timeout=args.timeout)
        try:
            await _warm_up(client, args, vocab_size)
            flushed = "no" if args.no_flush else await _flush(http)
            sessions = workloads.build(args, vocab_size)
            rate = None if args.request_rate == float("inf") else args.request_rate
            times = workloads.arrivals(len(sessions), rate, args.seed)
            run = await run_sessions(client, sessions, times, max_concurrency=args.max_concurrency, needs_ids=needs_ids)
        finally:
            await client.close()
    return server, flushed, run


async def _get(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """The JSON object at a path; empty where the server has no such route."""
    response = await http.get(path)
    if response.status_code in (404, 405):
        return {}
    response.raise_for_status()
    value: dict[str, Any] = response.json()
    return value


async def _backend(http: httpx.AsyncClient, args: argparse.Namespace, *, needs_ids: bool) -> Backend:
    if args.backend == "native":
        return NativeBackend(ignore_eos=not args.no_ignore_eos)
    model = args.model
    if model is None:
        cards = (await _get(http, "/v1/models")).get("data") or []
        if not cards:
            raise ServerError("the server lists no model at /v1/models: give --model")
        model = cards[0]["id"]
    return OpenAIBackend(model=model, ignore_eos=not args.no_ignore_eos, needs_ids=needs_ids)


async def _warm_up(client: Client, args: argparse.Namespace, vocab_size: int) -> None:
    """The first sessions of the same workload under another seed, one after the other. A failure shows in the measured ones too."""
    if args.warmup <= 0:
        return
    other = argparse.Namespace(**{**vars(args), "seed": args.seed + WARM_UP_SEED})
    sessions = workloads.build(other, vocab_size)[: args.warmup]
    await run_sessions(client, sessions, workloads.arrivals(len(sessions), None, 0), max_concurrency=1, needs_ids=False)


async def _flush(http: httpx.AsyncClient) -> str:
    """Empty the prefix cache, which then holds nothing of the warm-up; "yes", or why it could not be done."""
    response = await http.post("/flush_cache", params={"timeout": 10})
    if response.status_code == 404:
        return "no (the server cannot)"
    response.raise_for_status()
    return "yes"


if __name__ == "__main__":
    raise SystemExit(main())
