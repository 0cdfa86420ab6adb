"""The example programs through the frontend language, and the same calls made plainly over HTTP.

    python benchmarks/bench_frontend.py [--programs essay_judge,react] [--repeat 3] [--write docs/frontend.md] [--json FILE]

Each program runs on an empty cache: through the language; as sequential calls in the order of the program; as calls at once, each
sent when the calls that ended before it in the language's run have ended. A plain `select` is one call per choice. Each way's
figures are those of the fastest of the repeats, which take turns, after a run that is not measured.

"Computed" is the prompts' tokens less those from the cache. "Needed" is what a perfect cache must compute of the prompts: of one
that is gone on from all tokens, of a choice that is scored all but the last (its log-probability comes from the token before it),
each place once, less those that decoding has computed, which are the outputs without their last token. A place that is there
already is computed again where its logits are asked for: the last token of a prompt, and those before the tokens that are scored,
once for each request.

"Tree" is the size of the program's tree: the tokens of its prompts, each place once, a place where a call before has generated the
same token being that one, and the tokens of its outputs. Outputs are branches of their own, since each is sampled for itself: the
samples of `self_consistency` are five although at temperature 0 they turn out the same.

"Forward" is what forward passes have computed for it: "computed", and of each output all tokens but the last. Its first token comes
from the prompt's pass, its last is sampled and never an input. The answers tell all of it: `output_ids` has every token that was
sampled or that a grammar forced, also stop tokens and those of stop strings, which are cut from the text only; a request for no
tokens has no output. "Forward / tree" is 100 % where each token is computed once. Less is possible: nothing needs the last tokens
of choices, and of outputs that nobody goes on from.

"Launched" (in the JSON only) is what the scheduler itself has counted. It has more than "forward" where the overlap loop has
launched a stream's next step before its last token was known to be the last, and where requests were retracted.

"Chain" is the longest chain of sequential calls of which each must wait for the one before it: what the sequential calls would take
if those that need not wait cost each other nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from marked_block import write_block
from report import ROOT, environment, environment_lines, number, publish, table
from server_process import running_server

from banyan.lang.backend.runtime_endpoint import RuntimeEndpoint

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
HEAD = ["program", "calls", "wall s", "prompt tokens", "cached", "computed", "needed", "tree", "forward", "forward / tree"]
HEAD += ["wall / language", "chain s"]
COUNTS = ("prompt_tokens", "cached_tokens", "computed_tokens", "needed_tokens", "tree_tokens", "forward_tokens")
WAYS = ("language", "sequential HTTP", "concurrent HTTP")


@dataclass(slots=True)
class Call:
    """One request to /generate."""

    body: dict[str, Any]
    start: float
    end: float
    answers: list[dict[str, Any]]

    @property
    def scores(self) -> bool:
        """It asks for log-probabilities of its prompts."""
        return bool(self.body.get("return_logprob", False))

    @property
    def texts(self) -> list[str]:
        """Its prompts."""
        text = self.body["text"]
        if isinstance(text, list):
            return text
        return [text + choice for choice in self.body.get("continuations", [""])]

    def prompt(self, index: int) -> list[int]:
        """Token ids of the prompt of an answer."""
        ids: list[int] = self.answers[index]["prompt_token_ids"]
        return ids

    def num_scored(self, index: int) -> int:
        """How many tokens at its end are scored."""
        return len(self.answers[index]["meta_info"]["input_token_logprobs"]) if self.scores else 0


class Recording(RuntimeEndpoint):
    """A backend that keeps its calls."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.calls: list[Call] = []
        self._calls_lock = threading.Lock()

    def post(self, body: dict[str, Any]) -> Any:
        start = time.perf_counter()
        answer = super().post({**body, "return_prompt_token_ids": True})
        call = Call(body, start, time.perf_counter(), answer if isinstance(answer, list) else [answer])
        with self._calls_lock:
            self.calls.append(call)
        return answer


def example(name: str) -> ModuleType:
    """The module of an example program."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ValueError(f"no example {name!r}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def through_the_language(url: str, name: str) -> tuple[float, list[Call]]:
    """(seconds, calls in the order of their start)."""
    module, backend = example(name), Recording(url)
    begin = time.perf_counter()
    for state in module.PROGRAM.run_batch(module.ITEMS, backend=backend, temperature=0):
        if (error := state.error()) is not None:
            raise error
    seconds = time.perf_counter() - begin
    backend.shutdown()
    return seconds, sorted(backend.calls, key=lambda call: call.start)


def plain(calls: Sequence[Call]) -> list[tuple[Call, list[dict[str, Any]]]]:
    """What somebody without the language would send for each call: no requests for the cache's sake, a request per choice, which
    knows where its choice begins."""
    kept: list[tuple[Call, list[dict[str, Any]]]] = []
    for call in calls:
        if call.body["sampling_params"]["max_new_tokens"] == 0 and not call.scores:
            continue
        bodies = [call.body]
        if call.scores:
            body = {name: value for name, value in call.body.items() if name not in ("text", "continuations")}
            if "logprob_start_len" not in body:
                body["logprob_start_len"] = len(call.prompt(0)) - call.num_scored(0)
            bodies = [{**body, "text": text} for text in call.texts]
        kept.append((call, bodies))
    return kept


def sequential(endpoint: Recording, calls: Sequence[Call]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    for _, bodies in plain(calls):
        for body in bodies:
            endpoint.post(body)
    return time.perf_counter() - begin


def longest_chain(calls: Sequence[Call], alone: Sequence[Call]) -> float:
    """Seconds that the calls would take if those that need not wait for each other cost each other nothing. ``alone``: the plain
    calls as they were made one after the other."""
    seconds = iter([call.end - call.start for call in alone])
    chains: list[tuple[Call, float]] = []
    for call, bodies in plain(calls):
        before = max((chain for earlier, chain in chains if earlier.end <= call.start), default=0.0)
        chains.append((call, before + max(next(seconds) for _ in bodies)))
    return max(chain for _, chain in chains)


def concurrent(endpoint: Recording, calls: Sequence[Call]) -> float:
    """Seconds. A call waits for those that had ended when it began, so for whatever its text was made of."""
    work = plain(calls)
    done: dict[int, Future[None]] = {id(call): Future() for call, _ in work}
    begin = time.perf_counter()

    def run(call: Call, bodies: list[dict[str, Any]], pool: ThreadPoolExecutor) -> None:
        for earlier, _ in work:
            if earlier.end <= call.start:
                done[id(earlier)].result()
        list(pool.map(endpoint.post, bodies))
        done[id(call)].set_result(None)

    with ThreadPoolExecutor(256) as callers, ThreadPoolExecutor(256) as pool:
        for future in [callers.submit(run, call, bodies, pool) for call, bodies in work]:
            future.result()
    return time.perf_counter() - begin


def tree_tokens(calls: Sequence[Call]) -> int:
    """Places of the tree of all prompts, and all outputs; see above."""
    tree: dict[int, Any] = {}
    count = 0
    for call in calls:
        for answer in call.answers:
            node = tree
            for token in answer["prompt_token_ids"]:
                count += token not in node
                node = node.setdefault(token, {})
            for token in answer["output_ids"]:
                node = node.setdefault(token, {})
            count += len(answer["output_ids"])
    return count


def forward_tokens(calls: Sequence[Call]) -> int:
    """Tokens that were the input of a forward pass; see above."""
    answers = [answer for call in calls for answer in call.answers]
    metas = [answer["meta_info"] for answer in answers]
    prompts = sum(meta["prompt_tokens"] - meta["cached_tokens"] for meta in metas)
    return prompts + sum(max(len(answer["output_ids"]) - 1, 0) for answer in answers)


def needed_tokens(calls: Sequence[Call]) -> int:
    """Tokens that had to be computed; see above."""
    known: set[tuple[int, ...]] = set()  # places whose KV is there, as the tokens up to them
    count = 0
    for call in calls:
        new: set[tuple[int, ...]] = set()
        for index in range(len(call.answers)):
            prompt = tuple(call.prompt(index))
            end = len(prompt) - bool(call.scores)  # the last token whose logits are asked for
            first = len(prompt) - max(call.num_scored(index), 1) if call.scores else end
            new |= {prompt[:at] for at in range(1, end + 1) if at >= first or prompt[:at] not in known}
        count += len(new)
        known |= new
        for index, answer in enumerate(call.answers):
            whole = (*call.prompt(index), *answer["output_ids"])
            known |= {whole[:at] for at in range(len(call.prompt(index)) + 1, len(whole))}
    return count


def figures(seconds: float, calls: Sequence[Call]) -> dict[str, float]:
    metas = [answer["meta_info"] for call in calls for answer in call.answers]
    prompt, cached = (sum(meta[name] for meta in metas) for name in ("prompt_tokens", "cached_tokens"))
    counts = {"calls": len(metas), "prompt_tokens": prompt, "cached_tokens": cached, "computed_tokens": prompt - cached}
    whole = {"tree_tokens": tree_tokens(calls), "forward_tokens": forward_tokens(calls)}
    return {"seconds": seconds, **counts, "needed_tokens": needed_tokens(calls), **whole}


def num_launched(endpoint: RuntimeEndpoint) -> int:
    """Tokens of all forward steps since the server's start, as its scheduler has counted them."""
    state = endpoint.get_server_info()["internal_states"][0]
    return int(state["num_prefill_tokens"] + state["num_decode_tokens"])


def emptied(endpoint: RuntimeEndpoint) -> int:
    """Empty the cache; tokens launched so far."""
    endpoint.flush_cache()
    return num_launched(endpoint)


def measure(url: str, name: str, repeat: int) -> dict[str, dict[str, float]]:
    """Figures by way. The cache is empty before each."""
    endpoint = RuntimeEndpoint(url)
    through_the_language(url, name)
    best: dict[str, dict[str, float]] = {}
    for _ in range(repeat):
        before = emptied(endpoint)
        seconds, calls = through_the_language(url, name)
        found = {WAYS[0]: figures(seconds, calls) | {"launched_tokens": num_launched(endpoint) - before}}
        for way, run in zip(WAYS[1:], (sequential, concurrent), strict=True):
            before = emptied(endpoint)
            backend = Recording(url)
            seconds = run(backend, calls)
            found[way] = figures(seconds, sorted(backend.calls, key=lambda call: call.start))
            found[way]["launched_tokens"] = num_launched(endpoint) - before
            if run is sequential:
                found[way]["chain_seconds"] = longest_chain(calls, backend.calls)
            backend.shutdown()
        best = {way: min((best.get(way, of), of), key=lambda of: of["seconds"]) for way, of in found.items()}
    endpoint.shutdown()
    return best


def row(name: str, way: str, of: dict[str, float], language: dict[str, float]) -> list[str]:
    counts = [number(int(of[key])) for key in COUNTS]
    label = f"{name}, {way}"
    share = f"{of['forward_tokens'] / of['tree_tokens']:.1%}"
    chain = number(of["chain_seconds"]) if "chain_seconds" in of else ""
    slower = number(of["seconds"] / language["seconds"])
    return [label, number(int(of["calls"])), number(of["seconds"]), *counts, share, slower, chain]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help=f"of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each way (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the marks of bench_frontend of a page")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    args = parser.parse_args(argv)
    facts = environment()
    results: dict[str, dict[str, dict[str, float]]] = {}
    options = ["--load-format", args.load_format, "--log-level", "warning"]
    with running_server(args.model_path, options, start_timeout=300) as url:
        warm = RuntimeEndpoint(url)
        warm.post({"text": "hello", "sampling_params": {"max_new_tokens": 4}})
        for name in args.programs.split(","):
            results[name] = measure(url, name, args.repeat)
            warm.flush_cache()
        warm.shutdown()
    lines = [row(name, way, of, ways[WAYS[0]]) for name, ways in results.items() for way, of in ways.items()]
    report = {"environment": facts, "setting": {"model": args.model_path, "repeat": args.repeat}, "result": results}
    publish(report, HEAD, lines, args.json)
    if args.write is not None:
        notes = "".join(f"    {line}\n" for line in environment_lines(facts))
        write_block(args.write, "bench_frontend", table(HEAD, lines) + "\n\n" + notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
