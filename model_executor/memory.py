"""How many tokens of KV the memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from ..mem_cache.sizing import (
    beside_peak,
    default_mem_fraction,
    floor_page,
    graph_bytes,
    kv_budget,
    kv_bytes_per_token,
    tokens_in,
)
from .model_config import ModelConfig
from .step import RunnerConfig

CPU_SHARE = 0.3  # of the available memory that KV takes at most on a CPU, where other programs live too
CPU_FULL_REQUESTS = 32  # requests of full context that KV is sized for on a CPU unless max_running_requests says otherwise
MIN_TOKENS = 128  # a pool below that serves nobody
GIB = 1 << 30
GPU_CHUNK = 4096  # tokens of a chunk of a prompt where none are given
PEAK_MARGIN = 512 << 20  # bytes that stay free beside the peak: fragments, libraries' own


class Peak(NamedTuple):
    """What a step was measured to take besides weights and KV."""

    num_bytes: int
    num_tokens: int


class GraphCount(NamedTuple):
    """What will be recorded."""

    max_decode_batch: int = 0
    num_prefill: int = 0


def available_memory(device: torch.device) -> int:
    """Bytes that could be allocated now: CUDA's free memory, or what the machine and the process's cgroup leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    in_cgroup = cgroup_available()
    return available if in_cgroup is None else min(available, in_cgroup)


def cgroup_available(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the tightest memory limit of the process's cgroups (v1 or v2) leaves, None without a limit.

    Cached files that the kernel would drop first (inactive_file) count as free.
    """
    found: list[int] = []
    for line in proc.read_text().splitlines() if proc.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base) and (left := _left_in(folder, *names)) is not None:
                found.append(left)
    return min(found, default=None)


def _left_in(folder: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    limit_file, usage_file, stat_file = folder / limit_name, folder / usage_name, folder / "memory.stat"
    if not (limit_file.exists() and usage_file.exists() and stat_file.exists()):
        return None
    limit = limit_file.read_text().strip()
    if limit == "max":
        return None
    stat = dict(line.split(" ", 1) for line in stat_file.read_text().splitlines())
    return max(0, int(limit) - int(usage_file.read_text()) + int(stat.get(reclaimable, 0)))


def token_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a token's KV in one rank's part of the model."""
    return kv_bytes_per_token(
        num_layers=model.num_hidden_layers,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        elem_size=dtype.itemsize,
        scale_bytes=4 if dtype is torch.int8 else 0,
    )


def cache_tokens(
    config: RunnerConfig,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    free_before_load: int,
    mapped: int = 0,
    peak: Peak | None = None,
    graphs: GraphCount | None = None,
) -> tuple[int, str]:
    """(slots, why). Called when the weights are loaded. peak and graphs: of a CUDA device.

    mapped: bytes of files that the model lies in, which the system counts as available, for it could read them again.

    Raises ValueError where memory is too small for a useful pool.
    """
    per_token = token_bytes(model, dtype)
    free, page = available_memory(device) - mapped, config.page_size
    if config.max_total_tokens is not None:
        num_tokens = floor_page(config.max_total_tokens, page)
        if num_tokens < page:
            raise ValueError(f"max_total_tokens {config.max_total_tokens} is less than one page of {page} tokens")
        if (num_tokens + page) * per_token > free:
            need = f"{(num_tokens + page) * per_token / GIB:.2f} GiB"
            raise ValueError(f"max_total_tokens {config.max_total_tokens} needs {need}, but {free / GIB:.2f} GiB are available")
        return num_tokens, "max_total_tokens, as given"
    count = graphs or GraphCount()
    if device.type == "cpu" and config.mem_fraction_static is None:
        budget, why = _cpu_budget(config, model, per_token, free)
    else:
        total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else free_before_load
        budget, why = fraction_budget(config, total=total, free=(free_before_load, free), peak=peak, graphs=count)
    num_tokens = tokens_in(budget, per_token, page)
    least = max(page, min(model.context_len, MIN_TOKENS))
    if num_tokens < least:
        raise ValueError(
            f"not enough memory for KV: {budget / GIB:.2f} GiB ({why}) hold {num_tokens} tokens of {per_token} bytes, "
            f"at least {least} are needed"
        )
    return num_tokens, f"{num_tokens} tokens of {per_token} bytes in {budget / GIB:.2f} GiB: {why}"


def _cpu_budget(config: RunnerConfig, model: ModelConfig, per_token: int, free: int) -> tuple[int, str]:
    """(bytes for KV, why) on a CPU without mem_fraction_static."""
    requests = config.max_running_requests or CPU_FULL_REQUESTS
    ranks = config.ranks.local_size
    share, demand = int(CPU_SHARE * free / ranks), (requests * model.context_len + config.page_size) * per_token
    if demand < share:
        return demand, f"enough for {requests} requests of {model.context_len} tokens"
    return share, f"{CPU_SHARE / ranks:.0%} of the {free / GIB:.2f} GiB available after loading"


def fraction_budget(
    config: RunnerConfig, *, total: int, free: tuple[int, int], peak: Peak | None, graphs: GraphCount
) -> tuple[int, str]:
    """(bytes for KV, why) by mem_fraction_static, less where that leaves too little for a step of the measured peak.

    total: bytes of the device; free: what was available before and after loading.
    """
    fraction, source = config.mem_fraction_static, "as given"
    if fraction is None:
        chunk = GPU_CHUNK if config.chunked_prefill_size is None else config.chunked_prefill_size
        fraction, source = (
            default_mem_fraction(
                total / (1 << 20),
                chunked_prefill_size=chunk if chunk > 0 else None,
                max_decode_batch=graphs.max_decode_batch,
                num_prefill_graphs=graphs.num_prefill,
                num_ranks=config.ranks.world_size,
            ),
            "derived",
        )
    if not 0 < fraction < 1:
        raise ValueError(f"mem_fraction_static must be between 0 and 1, not {fraction}")
    why = f"mem_fraction_static {fraction} ({source}) of {free[0] / GIB:.2f} GiB free before loading, less the weights"
    budget = kv_budget(free_after_load=free[1], free_before_load=free[0], mem_fraction=fraction)
    if peak is None:
        return budget, why
    recorded = graph_bytes(max_decode_batch=graphs.max_decode_batch, num_prefill_graphs=graphs.num_prefill)
    limit = beside_peak(free_after_load=free[1], peak=peak.num_bytes, graphs=recorded, margin=PEAK_MARGIN)
    step = f"a step of {peak.num_tokens} tokens was measured to take {peak.num_bytes / GIB:.2f} GiB"
    return (budget, f"{why}; {step}") if budget <= limit else (limit, f"{why}, would leave too little: {step}")
