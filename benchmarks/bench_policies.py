"""What each scheduling policy reuses of the prompts, and what that does to latency, on four seeded traces.

    python benchmarks/bench_policies.py [--trace NAME ...] [--policy NAME ...] [--write docs/scheduling.md]
    python benchmarks/bench_policies.py --model smollm2

The real scheduler, radix tree and allocator run turn by turn in this process, with the overlap loop. What is simulated is time: a
forward step takes

    a + b * prompt tokens + c * decoding requests + d * tokens of context

so that the numbers are exact on any machine, however busy. The constants are those of SmolLM2-135M on two CPU cores. ``--model``
sends smaller traces to a real engine and measures the same columns in wall time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from marked_block import write_block
from policy_traces import TRACES, VOCAB, Conversation, Trace

from banyan.managers.config import RunnerConfig, SchedulerConfig
from banyan.managers.event_loop import OverlapLoop
from banyan.managers.io_struct import GenerateReq, TokenOutput, pack_ids, unpack_ids
from banyan.managers.ipc import IpcNames
from banyan.managers.req import Req
from banyan.managers.sampling_params import SamplingParams
from banyan.managers.schedule_policy import POLICIES
from banyan.managers.scheduler_process import build_memory, build_scheduler
from banyan.model_executor.step import ForwardMode, ModelInfo, StepInput, StepOutput

NO_CACHE = "no cache"
URGENT = 20  # priority of urgent requests; the others have 0
BLOCK = "bench_policies"
HEAD = ("trace", "policy", "reused", "TTFT p50, s", "TTFT p99, s", "urgent TTFT p50, s", "output tok/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a forward step: per step, per prompt token, per decoding request, per token of context that is read."""

    step: float = 8e-3
    prompt_token: float = 0.7e-3
    decode_row: float = 1.2e-3
    context_token: float = 1e-6

    def seconds(self, step: StepInput) -> float:
        lens = step.extend_lens
        decodes = np.zeros(len(lens), np.bool_) if step.mode is ForwardMode.EXTEND else lens == 1
        prompt_tokens, num_decodes = int(lens[~decodes].sum()), int(decodes.sum())
        context = int(step.seq_lens.sum())
        return self.step + self.prompt_token * prompt_tokens + self.decode_row * num_decodes + self.context_token * context


@dataclass(slots=True)
class Clock:
    now: float = 0.0


@dataclass(slots=True)
class SimHandle:
    """A step under way; waiting for it moves the clock to its end."""

    clock: Clock
    end: float
    output: StepOutput

    def done(self) -> bool:
        return self.clock.now >= self.end

    def wait(self) -> StepOutput:
        self.clock.now = max(self.clock.now, self.end)
        return self.output


class SimRunner:
    """A Runner that computes nothing and takes the time of the cost model, one step after the other."""

    info = ModelInfo(
        model_type="simulated",
        architectures=[],
        vocab_size=VOCAB,
        context_len=131072,
        eos_token_ids=[2],
        bos_token_id=1,
        dtype="",
        device="cpu",
        attention_backend="",
        load_format="",
    )

    def __init__(self, num_slots: int, clock: Clock, cost: StepCost) -> None:
        self._num_slots, self._clock, self._cost = num_slots, clock, cost
        self._free_at = 0.0

    def max_cache_tokens(self) -> int:
        return self._num_slots

    def init_cache(self, num_slots: int, req_to_token: np.ndarray) -> None:
        """Nothing to allocate."""

    def launch(self, step: StepInput) -> SimHandle:
        self._free_at = max(self._free_at, self._clock.now) + self._cost.seconds(step)
        ids = 3 + (step.rows * 7919 + step.seq_lens * 31).astype(np.int64)[step.sample_index] % (VOCAB - 3)
        return SimHandle(self._clock, self._free_at, StepOutput(next_ids=ids))

    def close(self) -> None:
        """Nothing to stop."""


class SimTokenizer:
    """All that the scheduler asks of a tokenizer."""

    eos_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Ask:
    """One request on its way."""

    conversation: Conversation
    turn: int
    prompt: np.ndarray
    arrived: float
    cached: int = 0
    first: float | None = None  # time of the first token
    end: float = 0.0
    output: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        if self.first is None:
            raise RuntimeError("the request has no output")
        return self.first - self.arrived

    def follow_up(self, now: float) -> Ask | None:
        """The next turn, whose prompt is all of this one, its answer and what the user adds."""
        conversation, turn = self.conversation, self.turn + 1
        if turn == len(conversation.turns):
            return None
        prompt = np.concatenate([self.prompt, np.array(self.output, np.int32), conversation.turns[turn]])
        return Ask(conversation, turn, prompt, now + conversation.think)


class Simulation:
    """One policy over one trace."""

    def __init__(self, trace: Trace, policy: str, cost: StepCost, options: dict[str, Any]) -> None:
        self.clock = Clock()
        page_size = options.get("page_size", 1)
        config = SchedulerConfig(
            ipc=IpcNames(directory="", scheduler="", detokenizer="", tokenizer=""),
            runner=RunnerConfig(model_path="", load_format="oracle", page_size=page_size, max_total_tokens=trace.num_slots),
            tokenizer_path="",
            max_running_requests=trace.max_running,
            schedule_policy="fcfs" if policy == NO_CACHE else policy,
            disable_radix_cache=policy == NO_CACHE,
            decode_log_interval=1 << 30,
            **{name: value for name, value in options.items() if name != "page_size"},
        )
        runner, tokenizer = SimRunner(trace.num_slots, self.clock, cost), SimTokenizer()
        info, memory = build_memory(config, runner, tokenizer)  # type: ignore[arg-type]
        self.scheduler = build_scheduler(config, info, memory, runner, self._take)
        self.loop = OverlapLoop(self.scheduler, self._receive)
        self.asks: dict[str, Ask] = {}
        self._arrivals: list[tuple[float, int, Ask]] = []
        self._count = itertools.count()
        for conversation in trace.conversations:
            self._later(Ask(conversation, 0, conversation.turns[0], conversation.start))

    def run(self) -> list[Ask]:
        """All requests, each with its times."""
        while self._arrivals or not self.scheduler.is_idle():
            self.loop.turn()
        return list(self.asks.values())

    def _later(self, ask: Ask) -> None:
        heapq.heappush(self._arrivals, (ask.arrived, next(self._count), ask))

    def _receive(self, in_flight: bool) -> None:
        """Hand over what has arrived; if there is nothing to do, time passes until something arrives."""
        if not in_flight and self.scheduler.is_idle() and self._arrivals:
            self.clock.now = max(self.clock.now, self._arrivals[0][0])
        while self._arrivals and self._arrivals[0][0] <= self.clock.now:
            self._submit(heapq.heappop(self._arrivals)[2])

    def _submit(self, ask: Ask) -> None:
        conversation, index = ask.conversation, len(self.asks)
        rid = f"r{index}"
        self.asks[rid] = ask
        message = GenerateReq(
            rid=rid,
            input_ids=pack_ids(ask.prompt),
            sampling_params=SamplingParams(max_new_tokens=conversation.max_new_tokens, temperature=0.0, ignore_eos=True),
            stream=True,
            priority=URGENT if conversation.urgent else 0,
            routing_key=conversation.key,
        )
        tokenizer: Any = SimTokenizer()
        self.scheduler.add(Req.from_message(message, arrival=index, weight_version="default", tokenizer=tokenizer))

    def _take(self, output: TokenOutput) -> None:
        ids = iter(unpack_ids(output.token_ids).tolist())
        for row, rid in enumerate(output.rids):
            ask = self.asks[rid]
            ask.output += itertools.islice(ids, output.num_ids[row])
            ask.cached = output.cached_tokens[row]
            if ask.first is None and ask.output:
                ask.first = self.clock.now
            if (reason := output.finish_reasons[row]) is not None:
                if reason.kind != "length":
                    raise RuntimeError(f"request {rid} ended with {reason}")
                ask.end = self.clock.now
                if (next_ask := ask.follow_up(self.clock.now)) is not None:
                    self._later(next_ask)


def summary(asks: Sequence[Ask]) -> dict[str, float | None]:
    """What one run shows. Times in seconds."""
    ttfts = np.array([ask.ttft for ask in asks])
    urgent = [ask.ttft for ask in asks if ask.conversation.urgent]
    last = max(ask.turn for ask in asks)
    span = max(ask.end for ask in asks) - min(ask.arrived for ask in asks)
    return {
        "reused": sum(ask.cached for ask in asks) / sum(len(ask.prompt) for ask in asks),
        "ttft_p50": float(np.percentile(ttfts, 50)),
        "ttft_p99": float(np.percentile(ttfts, 99)),
        "urgent_ttft_p50": float(np.median(urgent)) if urgent else None,
        "output_throughput": sum(len(ask.output) for ask in asks) / span,
        **{
            f"turn_{turn + 1}_ttft_p50": float(np.median([ask.ttft for ask in asks if ask.turn == turn]))
            for turn in range(last + 1)
        },
    }


def simulate(
    traces: Sequence[Trace], policies: Sequence[str], cost: StepCost, options: dict[str, Any]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """trace -> policy -> what it shows."""
    return {
        trace.name: {policy: summary(Simulation(trace, policy, cost, options).run()) for policy in policies} for trace in traces
    }


def table(results: dict[str, dict[str, dict[str, float | None]]]) -> str:
    """Everything in Markdown: the policies, then how the turns of a conversation go."""
    lines = [_row(HEAD), _row(["---"] * 2 + ["---:"] * (len(HEAD) - 2))]
    for trace, by_policy in results.items():
        for policy, values in by_policy.items():
            reused = f"{100 * (values['reused'] or 0):.1f} %"
            times = [_seconds(values[name]) for name in ("ttft_p50", "ttft_p99", "urgent_ttft_p50")]
            lines.append(_row([trace, policy, reused, *times, f"{values['output_throughput']:.1f}"]))
    for trace, by_policy in results.items():
        turns = [name for name in next(iter(by_policy.values())) if name.startswith("turn_")]
        if len(turns) == 1:
            continue
        lines += ["", f"TTFT p50 by turn on the {trace} trace, s:", ""]
        lines += [_row(["policy", *(str(turn + 1) for turn in range(len(turns)))]), _row(["---", *["---:"] * len(turns)])]
        lines += [_row([policy, *(_seconds(values[name]) for name in turns)]) for policy, values in by_policy.items()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", choices=list(TRACES), default=list(TRACES))
    policies = [*POLICIES, NO_CACHE]
    parser.add_argument("--policy", nargs="+", choices=policies, default=policies, help="policies, or 'no cache': fcfs without one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, help="factor on lengths and times of the traces (default: 1, with --model 0.05)")
    parser.add_argument("--num-conversations", type=int, help="the first so many of each trace (default: all, with --model 24)")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--chunked-prefill-size", type=int, default=512)
    parser.add_argument("--enable-mixed-chunk", action="store_true")
    parser.add_argument("--radix-eviction-policy", default="lru")
    parser.add_argument("--step-ms", type=float, default=8.0, help="a: each step (default: 8)")
    parser.add_argument("--prompt-token-ms", type=float, default=0.7, help="b: each prompt token (default: 0.7)")
    parser.add_argument("--decode-row-ms", type=float, default=1.2, help="c: each decoding request (default: 1.2)")
    parser.add_argument("--context-token-us", type=float, default=1.0, help="d: each token of context (default: 1)")
    parser.add_argument("--model", help="measure on a real engine with this model instead")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--write", type=Path, help="put the tables into the marked block of this file")
    args = parser.parse_args(argv)
    if args.scale is None:
        args.scale = 0.05 if args.model else 1.0
    if args.num_conversations is None and args.model:
        args.num_conversations = 24
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = parse(argv)
    whole = [TRACES[name](args.seed, args.scale) for name in args.trace]
    traces = [replace(trace, conversations=trace.conversations[: args.num_conversations]) for trace in whole]
    options = {
        name: getattr(args, name) for name in ("page_size", "chunked_prefill_size", "enable_mixed_chunk", "radix_eviction_policy")
    }
    if args.model:
        from policy_engine import measure

        results = measure(args.model, traces, args.policy, options, no_cache=NO_CACHE)
    else:
        cost = StepCost(
            step=args.step_ms / 1e3,
            prompt_token=args.prompt_token_ms / 1e3,
            decode_row=args.decode_row_ms / 1e3,
            context_token=args.context_token_us / 1e6,
        )
        results = simulate(traces, args.policy, cost, options)
    text = table(results)
    print(text, end="")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.write:
        write_block(args.write, BLOCK, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
