"""Each kernel on the GPU beside torch in float32 on the same GPU; used by gpu_check. Library backends where they are installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from banyan.layers.attention.base import AttentionSpec
from banyan.layers.attention.choice import LIBRARIES, installed_libraries
from banyan.layers.attention.registry import attention_backend
from banyan.layers.attention.torch_native import TorchNativeBackend
from banyan.layers.forward_batch import ForwardBatch
from banyan.layers.kernels import ops
from banyan.layers.sampler import draw_params, sample
from banyan.layers.sampling_input import TOP_K_ALL, SamplingInput
from banyan.layers.scaled_linear import DeviceFormat
from banyan.mem_cache.kv_pool import KVPool

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
BATCHES = {
    "decode": ([1500, 1, 90, 4097], [1, 1, 1, 1]),
    "prompts": ([210, 3, 700], [210, 3, 700]),
    "chunks": ([400, 2750], [70, 330]),
    "mixed": ([600, 333, 9], [1, 200, 9]),
}


def make_batch(seq_lens: list[int], extend_lens: list[int], page: int) -> tuple[ForwardBatch, int]:
    """Requests that own shuffled pages, and the number of slots."""
    rng = np.random.default_rng(0)
    seq, ext = np.array(seq_lens, np.int64), np.array(extend_lens, np.int64)
    pages = -(-seq // page)
    order = rng.permutation(int(pages.sum())) + 1
    table = np.zeros((len(seq) + 1, int(seq.max()) + 3), np.int32)
    for row, (length, own) in enumerate(zip(seq, np.split(order, np.cumsum(pages)[:-1]), strict=True), 1):
        table[row, :length] = (own[:, None] * page + np.arange(page)).reshape(-1)[:length]
    locs = [table[row, s - e : s] for row, (s, e) in enumerate(zip(seq, ext, strict=True), 1)]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(CUDA)

    zeros = torch.zeros(int(ext.sum()), dtype=torch.int64, device=CUDA)
    batch = ForwardBatch(
        input_ids=zeros,
        positions=zeros,
        rows=put(np.arange(1, len(seq) + 1)),
        seq_lens=put(seq),
        extend_lens=put(ext),
        prefix_lens=put(seq - ext),
        out_cache_loc=put(np.concatenate(locs).astype(np.int64)),
        req_to_token=put(table),
        sample_tokens=put(np.cumsum(ext) - 1),
        seq_lens_host=seq,
        extend_lens_host=ext,
        prefix_lens_host=seq - ext,
    )
    return batch, int(pages.sum()) * page


def attention(name: str, lens: str, *, group: int, dim: int, page: int, window: int | None, cap: float | None) -> dict[str, Any]:
    """Greatest difference of a backend in bf16 to float32 over the same values."""
    batch, num_slots = make_batch(*BATCHES[lens], page)
    heads, kv_heads = 2 * group, 2
    spec = AttentionSpec(1, heads, kv_heads, dim, dim**-0.5, window, cap)
    dtype = torch.bfloat16
    made = []
    for kind in (dtype, torch.float32):
        pool = KVPool(
            num_slots=num_slots, page_size=page, num_layers=2, num_kv_heads=kv_heads, head_dim=dim, dtype=kind, device=CUDA
        )
        generator = torch.Generator(CUDA).manual_seed(3)
        for tensor in (pool.k(1), pool.v(1)):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=CUDA).to(dtype))
        made.append(pool)
    shape = (int(batch.extend_lens_host.sum()), heads + 2 * kv_heads, dim)
    qkv = torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(4), device=CUDA).to(dtype)
    outs = []
    for backend, x in ((attention_backend(name)(made[0]), qkv), (TorchNativeBackend(made[1]), qkv.float())):
        backend.plan(batch)
        outs.append(backend.forward(x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :], spec, batch))
    return compare(*outs)


def compare(got: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """The greatest difference, relative where values exceed 1."""
    got_f, expected_f = got.float(), expected.float()
    worst = float(((got_f - expected_f).abs() / expected_f.abs().clamp(min=1)).max())
    return {"ok": worst <= TOLERANCE[got.dtype], "worst": round(worst, 6)}


def small_ops() -> dict[str, Callable[[], dict[str, Any]]]:
    """What ops_of("cuda") holds, beside torch's own in float32."""
    fused, generator = ops.ops_of("cuda"), torch.Generator(CUDA).manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=CUDA).bfloat16()

    x, delta, w, wide = noise(130, 2048), noise(130, 2048), noise(2048), noise(130, 6144)
    heads, tables = noise(130, 20, 128), (noise(130, 1, 64), noise(130, 1, 64))
    checks: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in ("rms_norm", "gemma_rms_norm"):
        checks[name] = lambda name=name: compare(getattr(fused, name)(x, w, 1e-5), getattr(ops.TORCH, name)(x, w, 1e-5))
    for name in ("add_rms_norm", "gemma_add_rms_norm"):
        checks[name] = lambda name=name: compare(
            getattr(fused, name)(x, delta, w, 1e-5)[0], getattr(ops.TORCH, name)(x, delta, w, 1e-5)[0]
        )
    for name in ("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"):
        checks[name] = lambda name=name: compare(getattr(fused, name)(wide), getattr(ops.TORCH, name)(wide.float()))
    checks["rotate"] = lambda: compare(
        fused.rotate(heads, tables), ops.rotate(heads.float(), (tables[0].float(), tables[1].float()))
    )
    a = torch.randint(-127, 128, (70, 512), dtype=torch.int8, device=CUDA)
    b = torch.randint(-127, 128, (256, 512), dtype=torch.int8, device=CUDA).T
    scales = (torch.rand(70, 1, device=CUDA) / 100, torch.rand(256, 1, device=CUDA) / 100)
    for name, kind in (("int8_mm", torch.int8), ("fp8_mm", torch.float8_e4m3fn)):
        checks[name] = lambda name=name, kind=kind: compare(
            getattr(fused, name)((a // 8).to(kind), (b // 8).to(kind), *scales, torch.bfloat16),
            ops.scaled_mm((a // 8).to(kind), (b // 8).to(kind), *scales, torch.float32),
        )
    for quantization in ("int8", "fp8", "int4"):
        checks[f"{quantization} linear"] = lambda quantization=quantization: linear(quantization, noise(256, 512), noise(33, 512))
    return checks


def linear(quantization: str, weight: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
    """A quantised linear beside torch's over the same quantised weights and activations."""
    ours, theirs = (DeviceFormat(quantization, kernels).pack(weight, None, {}) for kernels in (ops.ops_of("cuda"), ops.TORCH))
    return compare(ours(x), theirs(x))


def draws() -> dict[str, Any]:
    """The share of rows for which the kernel draws what the reference draws on the CPU."""
    rows, vocabulary = 64, 49152
    logits = torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(6)) * 3
    rng = np.random.default_rng(7)
    sampling = SamplingInput(
        rng.choice([0.0, 0.7, 1.0, 1.3], rows).astype(np.float32),
        rng.choice([1.0, 0.9, 0.5], rows).astype(np.float32),
        rng.choice([TOP_K_ALL, 50, 3], rows).astype(np.int32),
        rng.choice([0.0, 0.05], rows).astype(np.float32),
        np.arange(rows, dtype=np.int64),
        np.arange(rows, dtype=np.int64),
    )
    expected = sample(logits.clone(), sampling)
    kernel, params = ops.ops_of("cuda").draw, torch.from_numpy(draw_params(sampling)).to(CUDA)
    if kernel is None:
        return {"ok": False, "error": "no kernel"}
    got = sample(logits.to(CUDA), sampling, draw=lambda z, best: kernel(z, best, params_5S=params))
    same = int((got.cpu() == expected).sum())
    return {"ok": same >= rows - 1, "same": same, "rows": rows}  # a draw may fall on a boundary that float32 sums move


def check_all() -> dict[str, dict[str, Any]]:
    """Name -> result."""
    results: dict[str, dict[str, Any]] = {}
    installed = installed_libraries()
    backends = [name for name in ("triton", "flashinfer", "fa3") if LIBRARIES[name] in installed]
    shapes = [(3, 64), (1, 80), (8, 128), (2, 256)]
    options = [(1, None, None), (16, 100, None), (16, None, 20.0)]
    for name, lens, (group, dim), (page, window, cap) in itertools.product(backends, BATCHES, shapes, options):
        if name == "flashinfer" and dim == 80:
            continue
        label = f"{name} {lens} G {group} D {dim} page {page} window {window} cap {cap}"
        results[label] = attention(name, lens, group=group, dim=dim, page=page, window=window, cap=cap)
    for label, check in small_ops().items():
        results[label] = check()
    results["draws"] = draws()
    return results
