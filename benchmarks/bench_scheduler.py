"""Host time of the scheduler without a model: decode steps, admission under a long queue, match and evict; peers beside it.

    python benchmarks/bench_scheduler.py [--json FILE] [--peers DIR] [--write docs/scheduling.md]

--peers DIR holds virtual environments ``vllm`` and ``sglang`` (see docs/scheduling.md); what is missing there is left out.
Every number is the median over repeats, in microseconds unless its name says ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from marked_block import write_block
from report import environment, environment_lines, number
from report import table as markdown

from banyan.managers.config import RunnerConfig, SchedulerConfig
from banyan.managers.event_loop import OverlapLoop
from banyan.managers.io_struct import GenerateReq, pack_ids
from banyan.managers.ipc import IpcNames
from banyan.managers.req import Req
from banyan.managers.sampling_params import SamplingParams
from banyan.managers.scheduler_process import build_memory, build_scheduler
from banyan.mem_cache.allocator import SlotAllocator
from banyan.mem_cache.prefix_cache import CacheKey
from banyan.mem_cache.radix_cache import RadixCache
from banyan.model_executor.step import ModelInfo, StepInput, StepOutput

VOCAB = 32000
KEY = CacheKey()


class NullHandle:
    """A step that is over at once."""

    def __init__(self, size: int) -> None:
        self._output = StepOutput(next_ids=np.full(size, 7, np.int64))

    def done(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        return self._output


class NullRunner:
    """A Runner whose steps take no time."""

    info = ModelInfo(
        model_type="null",
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

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def max_cache_tokens(self) -> int:
        return self._num_slots

    def init_cache(self, num_slots: int, req_to_token: np.ndarray) -> None:
        """Nothing to allocate."""

    def launch(self, step: StepInput) -> NullHandle:
        return NullHandle(len(step.sample_index))

    def close(self) -> None:
        """Nothing to stop."""


class NullTokenizer:
    """All that the scheduler asks of a tokenizer."""

    eos_token_ids: tuple[int, ...] = ()


def make_scheduler(num_slots: int, max_running: int, policy: str) -> tuple[Any, OverlapLoop]:
    """A scheduler and its loop; outputs are encoded by nobody."""
    runner = NullRunner(num_slots)
    config = SchedulerConfig(
        ipc=IpcNames(directory="", scheduler="", detokenizer="", tokenizer=""),
        runner=RunnerConfig(model_path="", load_format="oracle"),
        tokenizer_path="",
        max_running_requests=max_running,
        schedule_policy=policy,
        max_prefill_tokens=1 << 20,
        chunked_prefill_size=-1,
    )
    tokenizer: Any = NullTokenizer()
    info, memory = build_memory(config, runner, tokenizer)
    scheduler = build_scheduler(config, info, memory, runner, lambda output: None)
    return scheduler, OverlapLoop(scheduler, lambda idle: None)


def add(scheduler: Any, index: int, ids: np.ndarray, max_new_tokens: int) -> None:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    message = GenerateReq(rid=f"r{index}", input_ids=pack_ids(ids), sampling_params=params, stream=True)
    tokenizer: Any = NullTokenizer()
    scheduler.add(Req.from_message(message, arrival=index, weight_version="default", tokenizer=tokenizer))


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def decode_step_us(batch: int) -> float:
    """Host time of one turn of the overlap loop (next_batch + launch + absorb), all requests streaming."""
    scheduler, loop = make_scheduler(batch * 1200 + 4096, batch, "fcfs")
    rng = np.random.default_rng(0)
    for index in range(batch):
        add(scheduler, index, rng.integers(3, VOCAB, 100), 1000)
    for _ in range(20):
        loop.turn()
    return timed(loop.turn, 300)


def queue_pass_ms(waiting: int, policy: str) -> float:
    """A scheduling pass with a full engine and so many requests waiting, half of which share one of 50 cached prefixes.

    Between passes one request ends and another arrives, so that the queue and the tree keep changing.
    """
    scheduler, loop = make_scheduler(400_000, 4, policy)
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(3, VOCAB, 400) for _ in range(50)]
    for index, prefix in enumerate(prefixes):
        add(scheduler, index, prefix, 1)
    while not scheduler.is_idle():
        loop.turn()
    for index in range(100, 100 + waiting):
        own = rng.integers(3, VOCAB, 100)
        add(scheduler, index, np.concatenate([prefixes[index % 50], own]) if index % 2 else own, 3)
    loop.turn()
    times = []
    for extra in range(60):
        add(scheduler, 1_000_000 + extra, np.concatenate([prefixes[extra % 50], rng.integers(3, VOCAB, 100)]), 3)
        start = time.perf_counter()
        batch = scheduler.next_batch(in_flight=False)
        times.append(time.perf_counter() - start)
        if batch:
            scheduler.absorb(batch, scheduler.launch(batch))
    return statistics.median(times) * 1e3


def match_us(prompt: int, nodes: int) -> float:
    """match_prefix of a prompt that is cached whole, over a path of so many nodes."""
    cache, ids = _chain(prompt, nodes)
    return timed(lambda: cache.match_prefix(KEY, ids), 200)


def insert_us(prompt: int) -> float:
    """Give a new prompt to the tree and let it go (cache_finished_req), slots included."""
    allocator = SlotAllocator(prompt * 60 + 64, 1)
    cache = RadixCache(allocator)
    rng = np.random.default_rng(0)
    prompts = iter([rng.integers(3, VOCAB, prompt).astype(np.int32) for _ in range(52)])

    def insert() -> None:
        ids = next(prompts)
        hold, _ = cache.lock_prefix(KEY, ids)
        slots = allocator.alloc_extend(np.array([0]), np.array([prompt]), np.array([0]))
        assert slots is not None
        cache.cache_finished_req(hold, ids, slots)

    return timed(insert, 50)


def evict_us(tree_tokens: int) -> float:
    """evict(50) in a tree of prompts of 50 tokens; what was evicted is put back between the calls."""
    allocator = SlotAllocator(tree_tokens + 1000, 1)
    cache = RadixCache(allocator)
    rng = np.random.default_rng(0)

    def put() -> None:
        ids = rng.integers(3, VOCAB, 50).astype(np.int32)
        hold, _ = cache.lock_prefix(KEY, ids)
        slots = allocator.alloc_extend(np.array([0]), np.array([50]), np.array([0]))
        assert slots is not None
        cache.cache_finished_req(hold, ids, slots)

    for _ in range(tree_tokens // 50):
        put()
    times = []
    for _ in range(200):
        start = time.perf_counter()
        cache.evict(50)
        times.append(time.perf_counter() - start)
        put()
    return statistics.median(times) * 1e6


def _chain(prompt: int, nodes: int) -> tuple[RadixCache, np.ndarray]:
    allocator = SlotAllocator(prompt + nodes + 64, 1)
    cache = RadixCache(allocator)
    ids = np.random.default_rng(0).integers(3, VOCAB, prompt).astype(np.int32)
    for end in np.linspace(prompt // nodes, prompt, nodes).astype(int):
        hold, prefix = cache.lock_prefix(KEY, ids[:end])
        new = allocator.alloc_extend(np.array([len(prefix)]), np.array([end]), np.array([0]))
        assert new is not None
        cache.cache_finished_req(hold, ids[:end], np.concatenate([prefix, new]))
    return cache, ids


def peers(folder: Path | None) -> dict[str, Any]:
    """What the peers' own schedulers and caches need for the same, measured in their own environments."""
    results = {}
    for name in ("vllm", "sglang"):
        python = folder / name / "bin" / "python" if folder else None
        if python is None or not python.exists():
            continue
        script = Path(__file__).with_name(f"peer_{name}_scheduler.py")
        run = subprocess.run([python, script], capture_output=True, text=True, check=False)
        lines = run.stdout.strip().splitlines()
        results[name] = json.loads(lines[-1]) if run.returncode == 0 and lines else {"error": run.stderr.strip().splitlines()[-1:]}
    return results


COLUMNS = ("banyan", "vllm", "sglang", "sglang unified")
ROWS = {
    "decode_step_us": "decode step, µs, requests:",
    "lpm_pass_ms": "pass over a queue under lpm, ms, waiting:",
    "fcfs_pass_ms": "pass over a queue under fcfs, ms, waiting:",
    "match_us": "match a cached prompt, µs, tokens:",
    "match_indices_us": "match and collect the slots, µs, tokens:",
    "hash_us": "build a request with its block hashes, µs, tokens:",
    "match_alloc_free_us": "match, allocate and free, µs, tokens:",
    "insert_us": "insert a prompt, µs, tokens:",
    "evict_us": "evict 50 tokens, µs, tokens in the tree:",
}


def table(result: dict[str, Any]) -> str:
    """What was measured, as Markdown; the peers' columns are empty where they have no such thing."""
    found = result["peers"]
    by_column = {
        "banyan": result,
        "vllm": found.get("vllm", {}),
        "sglang": found.get("sglang", {}),
        "sglang unified": found.get("sglang", {}).get("unified", {}),
    }
    rows = []
    for name, label in ROWS.items():
        sizes = dict.fromkeys(size for values in by_column.values() for size in values.get(name, {}))
        rows += [[f"{label} {size}", *(number(by_column[column].get(name, {}).get(size)) for column in COLUMNS)] for size in sizes]
    return markdown(["", *(f"{column} {by_column[column].get('version', '')}".strip() for column in COLUMNS)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--peers", type=Path, help="folder with the peers' virtual environments")
    parser.add_argument("--write", type=Path, help="put the table into the marked block of this file")
    args = parser.parse_args()
    facts = environment()
    result: dict[str, Any] = {
        "environment": facts,
        "decode_step_us": {str(size): decode_step_us(size) for size in (1, 16, 64, 256, 1024)},
        "lpm_pass_ms": {str(size): queue_pass_ms(size, "lpm") for size in (100, 1000, 10000)},
        "fcfs_pass_ms": {str(size): queue_pass_ms(size, "fcfs") for size in (100, 1000, 10000)},
        "match_us": {f"{size}/{nodes} nodes": match_us(size, nodes) for size in (100, 1000, 10000, 100000) for nodes in (1, 25)},
        "insert_us": {str(size): insert_us(size) for size in (100, 1000, 10000, 100000)},
        "evict_us": {str(size): evict_us(size) for size in (1000, 10000, 100000, 1000000)},
        "peers": peers(args.peers),
    }
    text = table(result)
    lines = "\n".join(environment_lines(facts))
    print(f"{lines}\n\n{text}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.write:
        write_block(args.write, "bench_scheduler", f"```\n{lines}\n```\n\n{text}\n")


if __name__ == "__main__":
    sys.exit(main())
