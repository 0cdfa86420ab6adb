"""Host time of vLLM's own scheduler and block manager, without a model: the peer of bench_scheduler.py.

Runs in an environment that holds vLLM (docs/scheduling.md says how to make one) and prints one line of JSON with the keys of
bench_scheduler.py. Decode steps are schedule + update_from_output; a match is get_computed_blocks over the request's block hashes,
and hash_us is what hashing the prompt costs before that. Blocks hold 16 tokens, vLLM's default.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
VOCAB = 32000
CONTEXT = 131072
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "torch_dtype": "float32",
}

numbers = itertools.count()


def make_scheduler(folder: str, num_tokens: int, max_running: int) -> Scheduler:
    """A scheduler over so many tokens of KV, with prefix caching."""
    num_blocks = num_tokens // BLOCK + 1
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    model = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=CONTEXT)
    scheduling = SchedulerConfig(
        max_num_seqs=max_running,
        max_num_batched_tokens=1 << 20,
        max_model_len=CONTEXT,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduling)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def make_request(ids: list[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=f"r{next(numbers)}",
        prompt_token_ids=ids,
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def turn(scheduler: Scheduler) -> None:
    """One step, whose model takes no time."""
    plan = scheduler.schedule()
    rids = list(plan.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=rids,
        req_id_to_index={rid: index for index, rid in enumerate(rids)},
        sampled_token_ids=[[7] for _ in rids],
    )
    scheduler.update_from_output(plan, output)


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def freeze() -> None:
    """What vLLM's engine does once it is ready: keep all that exists out of the garbage collector's way."""
    gc.collect()
    gc.freeze()


def tokens(rng: np.random.Generator, size: int) -> list[int]:
    ids: list[int] = rng.integers(3, VOCAB, size).tolist()
    return ids


def decode_step_us(folder: str, batch: int) -> float:
    scheduler = make_scheduler(folder, batch * 1200 + 4096, batch)
    rng = np.random.default_rng(0)
    for _ in range(batch):
        scheduler.add_request(make_request(tokens(rng, 100), 1000))
    for _ in range(20):
        turn(scheduler)
    freeze()
    return timed(lambda: turn(scheduler), 300)


def fcfs_pass_ms(folder: str, waiting: int) -> float:
    """schedule() with four requests that run and so many that wait, as in bench_scheduler.py; vLLM's queue is by arrival."""
    scheduler = make_scheduler(folder, 400_000, 4)
    rng = np.random.default_rng(0)
    prefixes = [tokens(rng, 400) for _ in range(50)]
    for prefix in prefixes:
        scheduler.add_request(make_request(prefix, 1))
    while scheduler.has_unfinished_requests():
        turn(scheduler)
    for index in range(waiting):
        own = tokens(rng, 100)
        scheduler.add_request(make_request(prefixes[index % 50] + own if index % 2 else own, 3))
    turn(scheduler)
    freeze()
    times = []
    for extra in range(60):
        scheduler.add_request(make_request(prefixes[extra % 50] + tokens(rng, 100), 3))
        start = time.perf_counter()
        plan = scheduler.schedule()
        times.append(time.perf_counter() - start)
        rids = list(plan.num_scheduled_tokens)
        index_of = {rid: index for index, rid in enumerate(rids)}
        scheduler.update_from_output(
            plan, ModelRunnerOutput(req_ids=rids, req_id_to_index=index_of, sampled_token_ids=[[7] for _ in rids])
        )
    return statistics.median(times) * 1e3


def cached_prompt(folder: str, prompt: int) -> tuple[float, float, float]:
    """(match, hash, allocate and free) of a prompt that is cached whole, in microseconds."""
    scheduler = make_scheduler(folder, 2 * prompt + 4096, 4)
    ids = tokens(np.random.default_rng(0), prompt)
    scheduler.add_request(make_request(ids, 1))
    while scheduler.has_unfinished_requests():
        turn(scheduler)
    freeze()
    manager = scheduler.kv_cache_manager
    request = make_request(ids, 1)
    if prompt >= 2 * BLOCK and not manager.get_computed_blocks(request)[1]:
        raise RuntimeError("the prompt is not cached")

    def allocate() -> None:
        blocks, length, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, prompt - length, num_new_computed_tokens=length, new_computed_blocks=blocks) is None:
            raise RuntimeError("there are no blocks left")
        manager.free(request)

    repeats = 200 if prompt <= 10_000 else 40
    return (
        timed(lambda: manager.get_computed_blocks(request), repeats),
        timed(lambda: make_request(ids, 1), min(repeats, 40)),
        timed(allocate, repeats),
    )


def main() -> None:
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        sizes = (100, 1000, 10_000, 100_000)
        cached = {str(size): cached_prompt(folder, size) for size in sizes}
        result = {
            "version": vllm.__version__,
            "decode_step_us": {str(size): decode_step_us(folder, size) for size in (1, 16, 64, 256, 1024)},
            "fcfs_pass_ms": {str(size): fcfs_pass_ms(folder, size) for size in (100, 1000, 10_000)},
            "match_us": {f"{size}/1 nodes": values[0] for size, values in cached.items()},
            "hash_us": {size: values[1] for size, values in cached.items()},
            "match_alloc_free_us": {size: values[2] for size, values in cached.items()},
        }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
