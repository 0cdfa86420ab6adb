"""Host time of SGLang's radix caches, without a model: the peer of bench_scheduler.py.

Runs in an environment that holds SGLang (docs/scheduling.md says how to make one) and prints one line of JSON with the keys of
bench_scheduler.py. There are two caches in SGLang: the tree in Python (``radix_cache``) and, under ``unified``, the one that its
server builds by default, with a core in Rust. A match is match_prefix; match_indices_us also collects the slots of the prefix.
SGLang's scheduler itself needs a model runner and is not measured. torch has one thread: its copies are small, and more threads
would measure how they wait for each other.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import json
import logging
import statistics
import sys
import time
import types
import warnings
from array import array
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

VOCAB = 32000
GPU_ONLY = ("sgl_kernel", "torchvision")
SIZES = (100, 1000, 10_000, 100_000)


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of packages that only a GPU's code paths use."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in GPU_ONLY else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: MagicMock()  # type: ignore[method-assign]


sys.meta_path.insert(0, StubFinder())
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import sglang  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


def make_cache(kind: type, num_slots: int) -> tuple[Any, Any]:
    """(cache, allocator) with pages of one token."""
    allocator = TokenToKVPoolAllocator(num_slots, torch.float32, "cpu", None, False)
    pool = types.SimpleNamespace(device="cpu", req_to_token=torch.zeros((4, 8), dtype=torch.int32), size=4)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        tree_components=(ComponentType.FULL,),
    )
    return kind(params), allocator


def prompt_of(rng: np.random.Generator, size: int) -> array[int]:
    return array("q", rng.integers(3, VOCAB, size).tolist())


def put(cache: Any, allocator: Any, ids: array[int], num_cached: int = 0) -> None:
    """Allocate what is new of a prompt and give all of it to the tree."""
    new = allocator.alloc(len(ids) - num_cached)
    if new is None:
        raise RuntimeError("there are no slots left")
    value = new
    if num_cached:
        hit = cache.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
        value = torch.cat([cache.path_device_indices(hit.last_device_node), new])
    cache.insert(InsertParams(key=RadixKey(ids), value=value))


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def match_us(kind: type, prompt: int, nodes: int) -> tuple[float, float]:
    """match_prefix of a prompt that is cached whole, over a path of so many nodes; and the same with the slots collected."""
    cache, allocator = make_cache(kind, prompt + nodes + 64)
    ids = prompt_of(np.random.default_rng(0), prompt)
    done = 0
    for end in np.linspace(prompt // nodes, prompt, nodes).astype(int).tolist():
        put(cache, allocator, ids[:end], done)
        done = end
    params = MatchPrefixParams(key=RadixKey(ids))
    if cache.match_prefix(params).device_prefix_len != prompt:
        raise RuntimeError("the prompt is not cached")
    return (
        timed(lambda: cache.match_prefix(params), 200),
        timed(lambda: cache.path_device_indices(cache.match_prefix(params).last_device_node), 200),
    )


def insert_us(kind: type, prompt: int) -> float:
    """Allocate slots for a new prompt and give it to the tree."""
    cache, allocator = make_cache(kind, prompt * 60 + 64)
    rng = np.random.default_rng(0)
    prompts = iter([prompt_of(rng, prompt) for _ in range(52)])
    return timed(lambda: put(cache, allocator, next(prompts)), 50)


def evict_us(kind: type, tree_tokens: int) -> float:
    """evict(50) in a tree of prompts of 50 tokens; what was evicted is put back between the calls."""
    cache, allocator = make_cache(kind, tree_tokens + 1000)
    rng = np.random.default_rng(0)
    for _ in range(tree_tokens // 50):
        put(cache, allocator, prompt_of(rng, 50))
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(200 if tree_tokens < 1_000_000 else 50):
        start = time.perf_counter()
        cache.evict(EvictParams(num_tokens=50))
        times.append(time.perf_counter() - start)
        put(cache, allocator, prompt_of(rng, 50))
    return statistics.median(times) * 1e6


def measure(kind: type) -> dict[str, dict[str, float]]:
    matches = {f"{size}/{nodes} nodes": match_us(kind, size, nodes) for size in SIZES for nodes in (1, 25)}
    return {
        "match_us": {name: values[0] for name, values in matches.items()},
        "match_indices_us": {name: values[1] for name, values in matches.items()},
        "insert_us": {str(size): insert_us(kind, size) for size in SIZES},
        "evict_us": {str(size): evict_us(kind, size) for size in (1000, 10_000, 100_000, 1_000_000)},
    }


def main() -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {"version": sglang.__version__, **measure(RadixCache)}
    try:
        result["unified"] = measure(UnifiedRadixCache)
    except (ImportError, RuntimeError, AttributeError, TypeError) as error:
        result["unified"] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
