"""What a JSON schema costs between two tokens, at several numbers of streams, and what jump-forward gains on JSON with fixed keys.

    python benchmarks/bench_structured.py [--model-path smollm2] [--streams 1,8,32] [--gain-streams 1,8] [--rounds 3]
        [--peer-url URL --peer-model NAME] [--write docs/performance.md] [--json FILE]

Overhead: free and constrained streams take turns, round by round, on one server without jump-forward; the schema never lets the
output end before its limit. The peer, any server with OpenAI's completions, is asked the same in the same rounds. Gain: the time of
whole outputs of a schema with fixed keys, with and without jump-forward.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from http_load import events
from marked_block import write_block
from report import environment, environment_lines, number, publish, table
from server_process import running_server

ITEM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
ENDLESS = {"type": "array", "items": ITEM}
COST_KEYS = ("free_itl_ms", "json_itl_ms", "overhead_percent")
COSTS = ["between two tokens", "free, ms", "json_schema, ms", "overhead, %"]
GAIN_KEYS = ("sampled_ms", "jumping_ms", "gain")
GAINS = ["whole outputs", "sampled, ms", "jumping, ms", "gain"]
KEYS = ("customer_name", "customer_age", "is_active_member", "postal_code", "preferred_language")
KINDS = ({"type": "integer", "maximum": 99}, {"type": "string", "maxLength": 6})
FIXED = {
    "type": "object",
    "properties": {name: KINDS[index % 2] for index, name in enumerate(KEYS)},
    "required": list(KEYS),
    "additionalProperties": False,
}


def body_of(model: str, schema: Any, *, tokens: int, index: int, whole: bool) -> dict[str, Any]:
    """whole: the output may end, else it has exactly so many tokens."""
    prompt = f"Customer record {index} as JSON:\n"
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "seed": index, "stream": True}
    if not whole:
        body |= {"ignore_eos": True, "min_tokens": tokens}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema}}
    return body


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    """When it was asked, and when each event with text arrived."""
    times = [time.perf_counter()]
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for now, event in events(reply.aiter_raw()):
            if event != b"[DONE]" and any(choice.get("text") for choice in msgspec.json.decode(event)["choices"]):
                times.append(now)
    return times


async def round_of(http: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[list[float]]:
    return await asyncio.gather(*(stream(http, body) for body in bodies))


async def overhead(servers: dict[str, tuple[str, str]], args: argparse.Namespace) -> dict[str, Any]:
    """servers: name -> (url, model). Median milliseconds between two tokens, free and constrained, and their ratio."""
    results: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for name, (url, model) in servers.items():
            clients[name] = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=900)), model
        for num_streams in args.streams:
            spans = {name: {"free": [], "json": []} for name in clients}
            for turn in range(args.rounds + 1):
                for name, (http, model) in clients.items():
                    for kind, schema in (("free", None), ("json", ENDLESS)):
                        bodies = [body_of(model, schema, tokens=args.tokens, index=i, whole=False) for i in range(num_streams)]
                        seen = await round_of(http, bodies)
                        if turn:  # the first round warms up
                            spans[name][kind].append(median_gap(seen))
            for name, found in spans.items():
                ratios = np.array(found["json"]) / np.array(found["free"])
                results[f"{name}, {num_streams} streams"] = {
                    "free_itl_ms": float(np.median(found["free"])),
                    "json_itl_ms": float(np.median(found["json"])),
                    "overhead_percent": float(np.median(ratios) - 1) * 100,
                }
    return results


def median_gap(seen: list[list[float]]) -> float:
    """Milliseconds between two events of a stream, from its second one on."""
    return statistics.median((times[-1] - times[2]) / (len(times) - 3) * 1e3 for times in seen if len(times) > 4)


async def whole_outputs(url: str, model: str, args: argparse.Namespace) -> dict[int, float]:
    """Milliseconds of one output by the number of streams."""
    found = {}
    async with httpx.AsyncClient(base_url=url, timeout=900) as http:
        for num_streams in args.gain_streams:
            spans = []
            for _ in range(args.rounds + 1):
                bodies = [body_of(model, FIXED, tokens=160, index=i, whole=True) for i in range(num_streams)]
                seen = await round_of(http, bodies)
                spans.append(statistics.median((times[-1] - times[0]) * 1e3 for times in seen))
            found[num_streams] = float(np.median(spans[1:]))
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32])
    parser.add_argument("--gain-streams", type=numbers, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-url")
    parser.add_argument("--peer-model", default="default")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between the marks of bench_structured of a page")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    facts = environment()
    options = ["--load-format", args.load_format, "--log-level", "warning"]
    with running_server(args.model_path, [*options, "--disable-jump-forward"], start_timeout=300) as url:
        servers = {"banyan": (url, "default")} | ({"peer": (args.peer_url, args.peer_model)} if args.peer_url else {})
        costs = asyncio.run(overhead(servers, args))
        without = asyncio.run(whole_outputs(url, "default", args))
    with running_server(args.model_path, options, start_timeout=300) as url:
        jumping = asyncio.run(whole_outputs(url, "default", args))
    gains = {
        f"fixed keys, {count} streams": {"sampled_ms": slow, "jumping_ms": jumping[count], "gain": slow / jumping[count]}
        for count, slow in without.items()
    }
    tables = [(COSTS, rows_of(costs, COST_KEYS)), (GAINS, rows_of(gains, GAIN_KEYS))]
    setting = {"model": args.model_path, "tokens": args.tokens, "rounds": args.rounds, "schema": json.dumps(ENDLESS)}
    publish({"environment": facts, "setting": setting, "result": costs | gains}, *tables[0], args.json)
    print("\n" + table(*tables[1]))
    if args.write is not None:
        notes = "".join(f"    {line}\n" for line in environment_lines(facts))
        write_block(args.write, "bench_structured", "\n\n".join(table(*each) for each in tables) + "\n\n" + notes)
    return 0


def rows_of(results: dict[str, dict[str, float]], keys: Sequence[str]) -> list[list[str]]:
    return [[name, *(number(result[key]) for key in keys)] for name, result in results.items()]


if __name__ == "__main__":
    sys.exit(main())
