"""How many tokens and requests a machine holds: bytes -> slots -> limits. Arithmetic only; sizes of memory are arguments."""

from __future__ import annotations

from typing import NamedTuple

MAX_RUNNING_CPU = 256
_ESTIMATE_MIN, _ESTIMATE_MAX, _ESTIMATE_FACTOR = 2048, 4096, 512


class GpuTier(NamedTuple):
    """Defaults that go with the size of a GPU."""

    chunked_prefill_size: int
    max_decode_batch: int


def floor_page(num_tokens: int, page_size: int) -> int:
    """num_tokens // page * page."""
    return num_tokens // page_size * page_size


def ceil_page(num_tokens: int, page_size: int) -> int:
    """Tokens of the pages that hold num_tokens."""
    return -(-num_tokens // page_size) * page_size


def kv_bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None, elem_size: int, scale_bytes: int = 0
) -> int:
    """layers * kv_heads * ((head_dim + v_head_dim) * elem_size + 2 * scale_bytes); num_kv_heads is that of one rank, scale_bytes
    what each head of K and of V has besides its elements."""
    row = (head_dim + (head_dim if v_head_dim is None else v_head_dim)) * elem_size + 2 * scale_bytes
    return num_layers * num_kv_heads * row


def tokens_in(num_bytes: int, bytes_per_token: int, page_size: int) -> int:
    """Slots that fit into num_bytes beside the scratch page: floor_page(bytes // bytes_per_token) - page, at least 0."""
    return max(0, floor_page(num_bytes // bytes_per_token, page_size) - page_size)


def kv_budget(*, free_after_load: int, free_before_load: int, mem_fraction: float) -> int:
    """Bytes left for KV: free_after_load - free_before_load * (1 - mem_fraction), at least 0."""
    return max(0, int(free_after_load - free_before_load * (1 - mem_fraction)))


def beside_peak(*, free_after_load: int, peak: int, graphs: int, margin: int) -> int:
    """Bytes left for KV beside the peak of a step and what recordings take: free - peak - graphs - margin, at least 0."""
    return max(0, free_after_load - peak - graphs - margin)


def graph_bytes(*, max_decode_batch: int, num_prefill_graphs: int) -> int:
    """What recordings are expected to take: 2 MiB per request of the largest decode step, 8 MiB per size of prompts."""
    return (2 * max_decode_batch + 8 * num_prefill_graphs) << 20


def gpu_tier(gpu_mem_gib: float | None, tp_size: int = 1) -> GpuTier:
    """Chunk size and largest decode batch by GPU memory in GiB; None: no GPU, or its size is not known."""
    wide = tp_size >= 4
    if gpu_mem_gib is None:
        return GpuTier(4096, 160)
    if gpu_mem_gib < 20:
        return GpuTier(2048, 8)
    if gpu_mem_gib < 35:
        return GpuTier(2048, 80 if wide else 24)
    if gpu_mem_gib < 60:
        return GpuTier(4096, 160 if wide else 32)
    if gpu_mem_gib < 160:
        return GpuTier(8192, 512 if wide else 256)
    return GpuTier(16384, 512)


def default_mem_fraction(
    gpu_mem_mib: float | None,
    *,
    chunked_prefill_size: int | None,
    max_prefill_tokens: int = 16384,
    max_decode_batch: int = 0,
    num_prefill_graphs: int = 0,
    num_ranks: int = 1,
) -> float:
    """Share of the memory for weights and KV: round((mem - reserved) / mem, 3); 0.88 where the memory is not known.

    reserved (MiB) = 512 + 1.5 * max(chunk, 2048) + ranks / 8 * 1024 + 2 * max_decode_batch + 8 * num_prefill_graphs (what graphs
    take); at least 10240 on GPUs over 60 GiB. chunk: chunked_prefill_size, or max_prefill_tokens where prompts are not chunked.
    """
    if gpu_mem_mib is None:
        return 0.88
    chunk = max_prefill_tokens if chunked_prefill_size is None else max(chunked_prefill_size, 2048)
    reserved = 512 + 1.5 * chunk + num_ranks / 8 * 1024 + 2 * max_decode_batch + 8 * num_prefill_graphs
    if gpu_mem_mib > 60 * 1024:
        reserved = max(reserved, 10240)
    return max(0.0, round((gpu_mem_mib - reserved) / gpu_mem_mib, 3))


def max_running_requests(max_total_tokens: int, context_len: int, *, user_limit: int | None = None, cpu: bool = False) -> int:
    """max(1, min(user_limit or estimate, max_total_tokens // 2)).

    estimate = clamp(int(max_total_tokens / context_len * 512), 2048, 4096), on a CPU at most 256.
    """
    limit = user_limit
    if limit is None:
        limit = min(max(int(max_total_tokens / context_len * _ESTIMATE_FACTOR), _ESTIMATE_MIN), _ESTIMATE_MAX)
        if cpu:
            limit = min(limit, MAX_RUNNING_CPU)
    return max(1, min(limit, max_total_tokens // 2))


def max_req_len(context_len: int, max_total_tokens: int, page_size: int) -> int:
    """Longest prompt + output the pool can ever hold: min(context_len, max_total_tokens - page - 1), at least 0."""
    return max(0, min(context_len, max_total_tokens - page_size - 1))


def max_prompt_len(context_len: int, max_total_tokens: int, page_size: int) -> int:
    """Longest prompt that leaves room for one token: min(context_len - 1, floor_page(max_total_tokens - page - 2)), at least 0."""
    return max(0, min(context_len - 1, floor_page(max_total_tokens - page_size - 2, page_size)))
