"""Throughput of Engine, without HTTP: all prompts in one call.

    python benchmarks/bench_offline.py --num-prompts 64 --input-len 128 --output-len 64 -- --page-size 16

What follows ``--`` are options of ``banyan serve``, which Engine shares.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import workloads
from report import environment, number, publish, spread

import banyan
from banyan.srt.server_args import ServerArgs, add_arguments

HEAD = ("metric", "median", "mean", "p90")
ROWS = {
    "duration_s": "duration, s",
    "request_throughput": "requests/s",
    "input_throughput": "input tokens/s",
    "output_throughput": "output tokens/s",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "cached_tokens": "cached tokens",
}


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerArgs]:
    """(options, options of the engine)."""
    own, engine_options = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, engine_options = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2", help="model to run (default: smollm2)")
    parser.add_argument("--repeats", type=workloads.positive, default=3, help="runs, the cache flushed before each (default: 3)")
    workloads.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    args = parser.parse_args(own)
    if args.workload == "multi-turn":
        parser.error("multi-turn needs a client that waits for answers: see bench_serving.py")
    workloads.complete(parser, args)
    engine_parser = argparse.ArgumentParser(prog="engine options")
    add_arguments(engine_parser)
    options = vars(engine_parser.parse_args(engine_options))
    return args, ServerArgs.from_kwargs({"log_level": "error", **options, "model_path": args.model_path})


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args, engine_args = parse(sys.argv[1:] if argv is None else argv)
    facts = environment()
    try:
        with banyan.Engine(server_args=engine_args) as engine:
            server = engine.get_server_info()
            turns = [session[0] for session in workloads.build(args, server["scheduler_info"]["model"]["vocab_size"])]
            _run(engine, turns[:1])
            runs = [_run(engine, turns) for _ in range(args.repeats)]
    except (banyan.StartError, banyan.RequestError, banyan.EngineDeadError) as error:
        print(f"bench_offline: error: {error}", file=sys.stderr)
        return 1
    results = {name: spread([run[name] for run in runs]) for name in ROWS}
    rows = [
        [label, *(number((results[name] or {}).get(column)) for column in ("p50", "mean", "p90"))] for name, label in ROWS.items()
    ]
    model = {name: str(server["scheduler_info"]["model"][name]) for name in ("dtype", "device", "attention_backend")}
    setting = {**workloads.settings(args), "repeats": args.repeats, "model": args.model_path, **model}
    result = {"benchmark": "offline", "environment": facts, "setting": setting, "server": server, "runs": runs, "results": results}
    publish(result, HEAD, rows, args.json)
    return 0


def _run(engine: banyan.Engine, turns: Sequence[workloads.Turn]) -> dict[str, float]:
    """One call of generate over an empty cache. Raises RequestError if a request fails."""
    if not (reply := engine.flush_cache(timeout=10)).success:
        raise banyan.RequestError(reply.message or "the cache could not be flushed")
    ids = [turn.input_ids for turn in turns]
    params = [{"temperature": 0.0, "max_new_tokens": turn.output_len, "ignore_eos": True} for turn in turns]
    begin = time.perf_counter()
    answers: Any = engine.generate(input_ids=ids, sampling_params=params)
    duration = time.perf_counter() - begin
    metas = [answer["meta_info"] for answer in answers]
    for meta in metas:
        if meta["finish_reason"]["type"] == "abort":
            raise banyan.RequestError(meta["finish_reason"].get("message", "a request was aborted"))
    totals = {name: sum(meta[key] for meta in metas) for name, key in (
        ("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens"), ("cached_tokens", "cached_tokens"))}  # fmt: skip
    return {
        "duration_s": duration,
        "request_throughput": len(metas) / duration,
        "input_throughput": totals["input_tokens"] / duration,
        "output_throughput": totals["output_tokens"] / duration,
        **{name: float(total) for name, total in totals.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
