"""The model alone: what one forward step costs, without scheduler, server or HTTP; and transformers' generate beside it.

    python benchmarks/bench_step.py
    python benchmarks/bench_step.py --prefill 1x128,1x512 --decode 1x256,8x256 --repeats 9 --no-reference

A case is BxT: B requests of T tokens. Prefill is one step over B prompts of T tokens and the sampling of B tokens. Decode is a step
that adds a token to each of B requests whose context is T tokens. Both sides compute the same weights in the same dtype, on the
same threads of the same process, over the same random prompts, greedily, and take turns: engine, transformers, engine, ...
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import workloads
from report import environment, number, publish

from banyan.managers.errors import StartError
from banyan.model_executor.factory import create_runner
from banyan.model_executor.step import TOP_K_ALL, ForwardMode, Runner, RunnerConfig, SamplingInput, StepInput
from banyan.srt.model_source import resolve_model

if TYPE_CHECKING:
    from reference_model import Reference

MIB = 1 << 20
HEAD = ("case", "unit", "banyan", "min", "max", "transformers", "min", "max", "ratio", "same tokens")


@dataclass(frozen=True, slots=True)
class Case:
    """B requests of T tokens."""

    mode: str  # prefill | decode
    num_requests: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.mode} {self.num_requests} x {self.length}"


def cases(mode: str) -> Callable[[str], list[Case]]:
    """``1x128,8x256`` as an argparse type; an empty text is no case."""

    def read(text: str) -> list[Case]:
        found = []
        for part in filter(None, text.split(",")):
            left, _, right = part.partition("x")
            found.append(Case(mode, workloads.positive(left), workloads.positive(right)))
        return found

    return read


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2", help="alias, folder or .gguf file (default: smollm2)")
    parser.add_argument("--load-format", default="auto", help="as of banyan serve (default: auto)")
    parser.add_argument("--dtype", default="auto", help="as of banyan serve (default: auto); transformers computes in the same")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--attention-backend", help="as of banyan serve")
    parser.add_argument(
        "--prefill", type=cases("prefill"), default="1x128,1x512,1x1024,8x128", metavar="BxT,...", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--decode", type=cases("decode"), default="1x256,8x256,32x256,64x256", metavar="BxT,...", help="(default: %(default)s)"
    )
    parser.add_argument("--decode-steps", type=workloads.positive, default=16, help="steps per decode repeat (default: 16)")
    parser.add_argument("--repeats", type=workloads.positive, default=5, help="measured repeats of each case (default: 5)")
    parser.add_argument("--reference-max-batch", type=int, default=8, help="transformers runs cases up to this B (default: 8)")
    parser.add_argument("--no-reference", action="store_true", help="measure without transformers")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    todo = [*args.prefill, *args.decode]
    if not todo:
        parser.error("nothing to measure")
    if args.load_format in ("dummy", "oracle") and not args.no_reference:
        parser.error(f"--load-format {args.load_format} has no weights that transformers could load: give --no-reference")
    facts = environment()
    _import_libraries(with_reference=not args.no_reference)
    rss = {"libraries loaded": _rss()}
    try:
        path = resolve_model(args.model_path).path
        bench = EngineSide(_config(args, path, todo), todo, args.decode_steps)
    except (StartError, ValueError) as error:
        print(f"bench_step: error: {error}", file=sys.stderr)
        return 1
    rss["and the model"] = _rss()
    reference = None if args.no_reference else _load_reference(path, bench.runner)
    if reference is not None:
        rss["and transformers' model"] = _rss()
    rng = np.random.default_rng(args.seed)
    results = [_measure(case, bench, _side(reference, case, args), rng, args) for case in todo]
    rss["after all cases"] = _rss()
    bench.runner.close()
    result = {
        "benchmark": "step",
        "environment": facts,
        "setting": _setting(args, bench.runner),
        "results": results,
        "rss_mib": rss,
    }
    publish(result, HEAD, [_row(each) for each in results] + [_memory_row(*item) for item in rss.items()], args.json)
    return 0


def _import_libraries(*, with_reference: bool) -> None:
    """So that the memory of the models is told apart from that of torch and transformers."""
    importlib.import_module("banyan.model_executor.model_runner")
    if with_reference:
        importlib.import_module("reference_model")


def _setting(args: argparse.Namespace, runner: Runner) -> dict[str, Any]:
    info = runner.info
    return {
        "model": args.model_path,
        "dtype": info.dtype,
        "device": info.device,
        "attention_backend": info.attention_backend,
        "threads": info.explain.get("threads", "-"),
        "repeats": args.repeats,
        "decode steps per repeat": args.decode_steps,
        "seed": args.seed,
    }


def _config(args: argparse.Namespace, path: str, todo: Sequence[Case]) -> RunnerConfig:
    """overlap=False: steps run on this thread, which transformers uses too."""
    return RunnerConfig(
        model_path=path,
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
        attention_backend=args.attention_backend,
        max_total_tokens=max(case.num_requests * (case.length + args.decode_steps + 1) for case in todo),
        overlap=False,
    )


def _load_reference(path: str, runner: Runner) -> Reference:
    from reference_model import Reference

    return Reference(Path(path), dtype=runner.info.dtype, device=runner.info.device)


def _side(reference: Reference | None, case: Case, args: argparse.Namespace) -> Reference | None:
    return reference if case.num_requests <= args.reference_max_batch else None


def _rss() -> float:
    """MiB of this process that are in memory, mapped pages of the weights' file included."""
    gc.collect()
    return float(psutil.Process().memory_info().rss / MIB)


# --- the engine's side ------------------------------------------------------------------------------------------------------------


class EngineSide:
    """Drives a runner as the scheduler does, over one table: request b has row b + 1."""

    def __init__(self, config: RunnerConfig, todo: Sequence[Case], decode_steps: int) -> None:
        """Load the model and allocate KV for the largest case. Raises ValueError as create_runner does."""
        self.runner = create_runner(config)
        limit = self.runner.info.context_len
        longest = max(case.length for case in todo) + decode_steps + 1
        if longest > limit:
            self.runner.close()
            raise ValueError(f"the longest case needs {longest} tokens of context, the model has {limit}")
        self._table = np.zeros((max(case.num_requests for case in todo) + 1, longest), np.int32)
        self.runner.init_cache(self.runner.max_cache_tokens(), self._table)

    def place(self, num_requests: int, length: int, width: int) -> None:
        """Slots for ``width`` tokens of each request: those of a prompt lie together, those of a decode step too, as they do when
        requests are prefilled one by one and then decode in one batch."""
        prompts = 1 + np.arange(num_requests * length).reshape(num_requests, length)
        outputs = 1 + num_requests * length + np.arange(num_requests * (width - length)).reshape(width - length, num_requests).T
        self._table[1 : num_requests + 1, :width] = np.concatenate([prompts, outputs], axis=1)

    def extend(self, prompts: np.ndarray, first: int = 0) -> np.ndarray:
        """Prefill prompts [B, T] of the requests from ``first`` on; the sampled ids, int64 [B]."""
        rows = np.arange(first + 1, first + len(prompts) + 1, dtype=np.int32)
        return self._step(ForwardMode.EXTEND, rows, prompts, prompts.shape[1])

    def decode(self, ids: np.ndarray, position: int) -> np.ndarray:
        """Add the tokens ``ids`` [B] at ``position``; the sampled ids, int64 [B]."""
        return self._step(ForwardMode.DECODE, np.arange(1, len(ids) + 1, dtype=np.int32), ids[:, None], position + 1)

    def _step(self, mode: ForwardMode, rows: np.ndarray, ids: np.ndarray, end: int) -> np.ndarray:
        """Compute ids [B, N] at positions [end - N, end)."""
        count = len(rows)
        step = StepInput(
            mode=mode,
            rows=rows,
            seq_lens=np.full(count, end, np.int32),
            extend_lens=np.full(count, ids.shape[1], np.int32),
            input_ids=ids.reshape(-1).astype(np.int64),
            out_cache_loc=self._table[rows, end - ids.shape[1] : end].reshape(-1),
            sample_index=np.arange(count, dtype=np.int32),
            sampling=SamplingInput(
                temperatures=np.zeros(count, np.float32),
                top_ps=np.ones(count, np.float32),
                top_ks=np.full(count, TOP_K_ALL, np.int32),
                min_ps=np.zeros(count, np.float32),
                seeds=np.zeros(count, np.int64),
                positions=np.full(count, end, np.int64),
            ),
        )
        return self.runner.launch(step).wait().next_ids


# --- one case ---------------------------------------------------------------------------------------------------------------------

Timed = tuple[float, np.ndarray]  # seconds (of the prefill, or of a decode step) and the ids, int64 [B, tokens]


def _measure(case: Case, bench: EngineSide, reference: Reference | None, rng: np.random.Generator, args: Any) -> dict[str, Any]:
    prompts = rng.integers(0, bench.runner.info.vocab_size, (case.num_requests, case.length))
    num_steps = args.decode_steps if case.mode == "decode" else 0
    sides: dict[str, Callable[[], Timed]] = {"banyan": _engine_run(case, bench, prompts, num_steps)}
    if reference is not None:
        sides["transformers"] = lambda: reference.run(prompts, num_steps)
    ids = {name: run()[1] for name, run in sides.items()}  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, run in sides.items():
            seconds[name].append(run()[0])
    values = {name: [_value(case, each) for each in times] for name, times in seconds.items()}
    result: dict[str, Any] = {"case": case.name, "unit": "tokens/s" if case.mode == "prefill" else "ms/step", "values": values}
    if reference is not None:
        ours, theirs = (statistics.median(values[name]) for name in ("banyan", "transformers"))
        result["ratio"] = ours / theirs if case.mode == "prefill" else theirs / ours
        result["same_tokens"] = int((ids["banyan"] == ids["transformers"]).sum())
        result["num_tokens"] = ids["banyan"].size
    return result


def _engine_run(case: Case, bench: EngineSide, prompts: np.ndarray, num_steps: int) -> Callable[[], Timed]:
    """A repeat. A decode's context is computed once, here, one prompt at a time; repeats overwrite what follows it."""
    bench.place(case.num_requests, case.length, case.length + num_steps)
    if case.mode == "prefill":

        def prefill() -> Timed:
            begin = time.perf_counter()
            ids = bench.extend(prompts)
            return time.perf_counter() - begin, ids[:, None]

        return prefill
    first = np.concatenate([bench.extend(prompt[None], b) for b, prompt in enumerate(prompts)])

    def decode() -> Timed:
        ids = [first]
        begin = time.perf_counter()
        for i in range(num_steps):
            ids.append(bench.decode(ids[-1], case.length + i))
        return (time.perf_counter() - begin) / num_steps, np.stack(ids, axis=1)

    return decode


def _value(case: Case, seconds: float) -> float:
    """Tokens per second of a prefill, milliseconds per decode step."""
    return case.num_requests * case.length / seconds if case.mode == "prefill" else 1e3 * seconds


def _row(result: dict[str, Any]) -> list[str]:
    cells = [result["case"], result["unit"]]
    for name in ("banyan", "transformers"):
        values = result["values"].get(name)
        cells += [number(each(values)) if values else "-" for each in (statistics.median, min, max)]
    ratio = result.get("ratio")
    return [*cells, f"{ratio:.2f}x" if ratio else "-", f"{result['same_tokens']}/{result['num_tokens']}" if ratio else "-"]


def _memory_row(name: str, mib: float) -> list[str]:
    return [f"RSS {name}", "MiB", number(mib, 0), *["-"] * 7]


if __name__ == "__main__":
    raise SystemExit(main())
