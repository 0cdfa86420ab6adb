"""How a start on a CUDA device attends, stores KV, records decode and samples: each choice with its reason."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layers.attention.base import AttentionBackend
from ..layers.attention.choice import AttentionNeeds, choose_attention, describe, installed_libraries
from ..layers.attention.phases import PhaseBackend
from ..layers.attention.registry import attention_backend
from ..layers.kernels.ops import Draw, ops_of
from ..mem_cache.kv_pool import KVPool
from ..mem_cache.sizing import gpu_tier
from .cuda_graph import capture_sizes, parse_sizes
from .prefill_graph import DEFAULT_MAX_TOKENS, prefill_sizes
from .step import RunnerConfig

RECORDABLE = ("triton", "flashinfer", "fa3")
KV_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
FP8_BACKENDS = ("triton", "flashinfer")
E4M3_CAPABILITY = (8, 9)  # the first that converts it
GIB = 1 << 30
_GPU_OPTIONS = (
    "prefill_attention_backend",
    "decode_attention_backend",
    "sampling_backend",
    "cuda_graph_max_bs",
    "cuda_graph_bs",
    "prefill_cuda_graph_max_tokens",
)


class GpuFacts(NamedTuple):
    """What a plan depends on besides the config. Tests make them up."""

    capability: tuple[int, int]
    memory: int  # bytes in all
    installed: frozenset[str]
    head_dim: int
    compute: torch.dtype
    is_whole: bool  # one rank holds the whole model

    @classmethod
    def of(cls, device: torch.device, *, head_dim: int, compute: torch.dtype, is_whole: bool) -> GpuFacts:
        """Of a device that is there."""
        capability = torch.cuda.get_device_capability(device)
        return cls(capability, torch.cuda.mem_get_info(device)[1], installed_libraries(), head_dim, compute, is_whole)


class GpuPlan(NamedTuple):
    """What the facts and the config lead to."""

    prefill: str
    decode: str
    kv_dtype: torch.dtype
    graph_sizes: tuple[int, ...]  # none: decode is not recorded
    draw: Draw | None  # a kernel that samples
    explain: dict[str, str]
    prefill_graph_sizes: tuple[int, ...] = ()  # numbers of tokens

    @property
    def backend(self) -> str:
        """A name for both phases."""
        return self.decode if self.prefill == self.decode else f"{self.prefill}+{self.decode}"

    def make_backend(self, pool: KVPool) -> AttentionBackend:
        """The backends over a pool, as one."""
        decode = attention_backend(self.decode)(pool)
        return decode if self.prefill == self.decode else PhaseBackend(attention_backend(self.prefill)(pool), decode)


def refuse_gpu_options(config: RunnerConfig) -> None:
    """Raises ValueError for an option that only a CUDA device has."""
    for name in _GPU_OPTIONS:
        if getattr(config, name) is not None:
            raise ValueError(f"{name} is for CUDA devices, this is a CPU")


def plan_gpu(config: RunnerConfig, facts: GpuFacts) -> GpuPlan:
    """Raises ValueError with one line for options that cannot be met, naming the reason."""
    kv_dtype, kv_why = _kv_dtype(config.kv_cache_dtype, facts)
    needs = AttentionNeeds(
        device="cuda",
        capability=facts.capability,
        installed=facts.installed,
        head_dim=facts.head_dim,
        kv_bytes=kv_dtype.itemsize,
        model_bytes=facts.compute.itemsize,
    )
    choice = choose_attention(
        needs,
        both=config.attention_backend,
        prefill=config.prefill_attention_backend,
        decode=config.decode_attention_backend,
        cpu="torch_native",
    )
    for name in (choice.prefill, choice.decode):
        if kv_dtype.itemsize == 1 and name not in FP8_BACKENDS:
            raise ValueError(f"attention backend {name} does not read fp8 KV; {', '.join(FP8_BACKENDS)} do")
    sizes, graph_why = plan_graphs(config, facts, choice.decode)
    prefill_graphs, prefill_why = plan_prefill_graphs(config, facts.is_whole)
    draw, draw_why = _plan_draw(config.sampling_backend)
    ops = ops_of("cuda")
    explain = {
        "attention_backend": describe(choice),
        "kv_cache_dtype": f"{str(kv_dtype)[6:]} ({kv_why})",
        "cuda_graphs": graph_why,
        "prefill_cuda_graphs": prefill_why,
        "sampling_backend": draw_why,
        "fused_ops": f"norms and activations {ops.norms}, quantised products {ops.products}",
    }
    return GpuPlan(choice.prefill, choice.decode, kv_dtype, tuple(sizes), draw, explain, tuple(prefill_graphs))


def plan_graphs(config: RunnerConfig, facts: GpuFacts, decode: str) -> tuple[list[int], str]:
    """(sizes to record, why)."""
    if config.disable_cuda_graph:
        return [], "off, as given"
    given = config.cuda_graph_bs is not None or config.cuda_graph_max_bs is not None
    obstacle = None
    if decode not in RECORDABLE:
        obstacle = f"attention backend {decode} cannot be recorded"
    elif not facts.is_whole:
        obstacle = "the model is spread over ranks"
    if obstacle is not None:
        if given:
            raise ValueError(f"CUDA graphs were asked for, but {obstacle}")
        return [], f"off: {obstacle}"
    if config.cuda_graph_bs is not None:
        sizes = parse_sizes(config.cuda_graph_bs)
        if config.cuda_graph_max_bs is not None:
            sizes = [size for size in sizes if size <= config.cuda_graph_max_bs]
        if not sizes:
            raise ValueError("no size of cuda_graph_bs is within cuda_graph_max_bs")
        why = "as given"
    else:
        most = config.cuda_graph_max_bs or gpu_tier(facts.memory / GIB).max_decode_batch
        if config.max_running_requests is not None:
            most = min(most, config.max_running_requests)
        sizes, why = capture_sizes(most), "as given" if config.cuda_graph_max_bs else "by the size of the GPU's memory"
    return sizes, f"{len(sizes)} sizes up to {sizes[-1]} ({why})"


def plan_prefill_graphs(config: RunnerConfig, is_whole: bool) -> tuple[list[int], str]:
    """(numbers of tokens to record, why)."""
    given = config.prefill_cuda_graph_max_tokens
    if config.disable_cuda_graph or config.disable_prefill_cuda_graph:
        return [], "off, as given"
    if not is_whole:
        if given is not None:
            raise ValueError("CUDA graphs of prompts were asked for, but the model is spread over ranks")
        return [], "off: the model is spread over ranks"
    chunk = config.chunked_prefill_size or 0
    most = given or (min(chunk, DEFAULT_MAX_TOKENS) if chunk > 0 else DEFAULT_MAX_TOKENS)
    sizes = prefill_sizes(most)
    return sizes, f"{len(sizes)} sizes up to {most} tokens, in pieces between attention ({'as given' if given else 'default'})"


def _kv_dtype(wanted: str, facts: GpuFacts) -> tuple[torch.dtype, str]:
    if wanted == "auto":
        return facts.compute, "that of activations"
    if wanted not in KV_DTYPES:
        raise ValueError(f"kv_cache_dtype {wanted!r} is not for GPUs; known there are auto, {', '.join(KV_DTYPES)}")
    dtype = KV_DTYPES[wanted]
    if dtype.itemsize > 1 and dtype is not facts.compute:
        raise ValueError(f"kv_cache_dtype {wanted} needs that dtype of activations, which are {str(facts.compute)[6:]}")
    if dtype is torch.float8_e4m3fn and facts.capability < E4M3_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype {wanted} needs compute capability 8.9, this is {facts.capability[0]}.{facts.capability[1]}"
        )
    return dtype, "as given"


def _plan_draw(wanted: str | None) -> tuple[Draw | None, str]:
    kernel = ops_of("cuda").draw
    if wanted == "pytorch":
        return None, "pytorch (as given)"
    if kernel is None:
        if wanted == "triton":
            raise ValueError("sampling backend triton: triton is not installed")
        return None, "pytorch (triton is not installed)"
    return kernel, f"triton ({'as given' if wanted else 'it never waits for the device'})"
