"""One door to fused operations: sgl-kernel's where it is installed, else Triton's, else torch's. The same meaning in each.

What a device uses is decided when it is first asked for; a layer keeps the function that it needs, so that a call looks nothing up.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
Gated = Callable[[torch.Tensor], torch.Tensor]
Rotate = Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
ScaledMM = Callable[..., torch.Tensor]
Quantize = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
Draw = Callable[..., torch.Tensor]
TINY = 1e-30  # a scale below it is one of a row of zeros
SGL_ALIGNMENT = 16  # what the sizes of sgl-kernel's products must be multiples of


@dataclass(frozen=True, kw_only=True)
class FusedOps:
    """T tokens, D values of a row, H heads, I inner size, M x K activations, N features."""

    norms: str  # whose each of these are: sgl-kernel, triton or torch
    products: str
    rms_norm: Norm  # (x [T, D] or [T, H, D], w [D], eps): x / rms(x), rounded, times w
    gemma_rms_norm: Norm  # the same, times (1 + w) before it is rounded
    add_rms_norm: AddNorm  # (x [T, D], delta [T, D], w, eps): (rms_norm(x + delta), x + delta)
    gemma_add_rms_norm: AddNorm
    silu_and_mul: Gated  # [T, 2 I] -> [T, I]
    gelu_tanh_and_mul: Gated
    gelu_and_mul: Gated
    rotate: Rotate  # (x [T, H, D], (cos, sin) each [T, 1, D / 2]); x is left as it was
    quantize: Quantize  # (x [T, K], int8 or float8_e4m3fn) -> (integers or floats [T, K], scales float32 [T])
    int8_mm: ScaledMM  # (a int8 [M, K], b int8 [K, N] with K contiguous, scale_a [M], scale_b [N], out_dtype, bias=None)
    fp8_mm: ScaledMM  # the same in float8_e4m3fn
    int4_mm: ScaledMM  # (x [M, K], packed uint8 [N, K / 2], scales and minimums [N, K / group], group=, bias=None), see pack_int4
    draw: Draw | None  # (logits [S, V], best int64 [S], params_5S=float64) -> ids, without the host; None: layers/sampler.py's


def current_ops() -> FusedOps:
    """Those of torch's default device: what a layer asks for when it is built."""
    ops = ops_of(torch.get_default_device().type)
    return _traceable(ops) if _TRACEABLE.get() else ops


_TRACEABLE: ContextVar[bool] = ContextVar("traceable", default=False)


@contextmanager
def traceable_ops() -> Iterator[None]:
    """Layers that are built within give torch.compile torch's own operations to fuse, and use what ops_of says otherwise."""
    token = _TRACEABLE.set(True)
    try:
        yield
    finally:
        _TRACEABLE.reset(token)


def _traceable(ops: FusedOps) -> FusedOps:
    def either(fused: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def apply(*args: Any) -> Any:
            return plain(*args) if torch.compiler.is_compiling() else fused(*args)

        return apply

    names = ["rms_norm", "gemma_rms_norm", "add_rms_norm", "gemma_add_rms_norm"]
    names += ["silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"]
    found: dict[str, Any] = {name: either(getattr(ops, name), getattr(TORCH, name)) for name in names}
    return replace(ops, rotate=either(ops.rotate, _rotate_anew), **found)


def _rotate_anew(x_THD: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """rotate without writing to views, which a compiler would stop at."""
    cos, sin = tables
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@cache
def ops_of(device_type: str) -> FusedOps:
    """The operations of a kind of device."""
    if device_type != "cuda" or importlib.util.find_spec("triton") is None:
        return TORCH
    ops = triton_ops()
    if importlib.util.find_spec("sgl_kernel") is None:
        return ops
    return with_sgl_kernel(ops, torch.cuda.get_device_capability() if torch.cuda.is_available() else None)


# --- torch ----------------------------------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """FusedOps.rms_norm in torch."""
    if x.dtype is torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """FusedOps.gemma_rms_norm in torch."""
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """FusedOps.add_rms_norm in torch."""
    total = x + delta
    return rms_norm(total, weight, eps), total


def gemma_add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """FusedOps.gemma_add_rms_norm in torch."""
    total = x + delta
    return gemma_rms_norm(total, weight, eps), total


def _gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Gated:
    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate).mul_(up)

    return apply


def rotate(x_THD: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """FusedOps.rotate in torch: dim i of the first half pairs with dim i of the second."""
    cos, sin = tables
    half = x_THD.shape[-1] // 2
    first, second = x_THD[..., :half], x_THD[..., half:]
    out = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def quantize(x_TK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """FusedOps.quantize in torch: a row's scale maps its greatest value to the greatest of dtype; ties go to even."""
    limit = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    x = x_TK.float()
    scale = x.abs().amax(1) / limit
    x = (x * torch.where(scale > TINY, 1 / scale, 0.0)[:, None]).clamp(-limit, limit)
    return (x.round() if dtype is torch.int8 else x).to(dtype), scale


def scaled_mm(
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """FusedOps.int8_mm and fp8_mm in torch, through float32: exact for int8 up to K = 1040."""
    out = (a_MK.float() @ b_KN.float()) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def pack_int4(nibbles: torch.Tensor, group: int) -> torch.Tensor:
    """uint8 [N, K / 2] of values 0..15 [N, K]: byte j of a group holds value j in its low half, j + group / 2 in its high one."""
    halves = nibbles.to(torch.uint8).view(nibbles.shape[0], -1, 2, group // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1).contiguous()


def int4_mm(
    x_MK: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor,
    *,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """FusedOps.int4_mm in torch: weights are nibble * scale + minimum."""
    groups = packed.view(packed.shape[0], -1, 1, group // 2)
    nibbles = torch.cat([groups & 15, groups >> 4], dim=2).view(packed.shape[0], -1, group)
    weight = nibbles.float() * scales.float()[..., None] + minimums.float()[..., None]
    out = x_MK.float() @ weight.flatten(1).T
    return (out if bias is None else out + bias.float()).to(x_MK.dtype)


TORCH = FusedOps(
    norms="torch",
    products="torch",
    rms_norm=rms_norm,
    gemma_rms_norm=gemma_rms_norm,
    add_rms_norm=add_rms_norm,
    gemma_add_rms_norm=gemma_add_rms_norm,
    silu_and_mul=_gated(F.silu),
    gelu_tanh_and_mul=_gated(lambda x: F.gelu(x, approximate="tanh")),
    gelu_and_mul=_gated(F.gelu),
    rotate=rotate,
    quantize=quantize,
    int8_mm=scaled_mm,
    fp8_mm=scaled_mm,
    int4_mm=int4_mm,
    draw=None,
)


# --- Triton and sgl-kernel ------------------------------------------------------------------------------------------------------


def triton_ops() -> FusedOps:
    """Triton's, and torch's GELU by erf."""
    from .triton import launch

    return FusedOps(
        norms="triton",
        products="triton",
        rms_norm=launch.rms_norm,
        gemma_rms_norm=launch.gemma_rms_norm,
        add_rms_norm=launch.add_rms_norm,
        gemma_add_rms_norm=launch.gemma_add_rms_norm,
        silu_and_mul=launch.silu_and_mul,
        gelu_tanh_and_mul=launch.gelu_tanh_and_mul,
        gelu_and_mul=TORCH.gelu_and_mul,
        rotate=launch.rotate,
        quantize=launch.quantize,
        int8_mm=launch.scaled_mm,
        fp8_mm=launch.scaled_mm,
        int4_mm=launch.int4_mm,
        draw=launch.sample,
    )


def with_sgl_kernel(ops: FusedOps, capability: tuple[int, int] | None = None) -> FusedOps:
    """sgl-kernel's norms, activations and products over ``ops``: it takes 16-bit rows of two dims, the rest stays with ``ops``.

    It rounds a norm once, behind the weight, so that it differs by a last bit from the others. Its int8 product ends with compute
    capability 9.x.
    """
    library: Any = importlib.import_module("sgl_kernel")

    def norm(function: Callable[..., torch.Tensor], other: Norm) -> Norm:
        def apply(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            if x.ndim != 2 or x.dtype is torch.float32 or not x.is_contiguous():
                return other(x, weight, eps)
            return function(x, weight, eps)

        return apply

    def gated(function: Gated, other: Gated) -> Gated:
        def apply(gate_up: torch.Tensor) -> torch.Tensor:
            aligned = gate_up.shape[-1] * gate_up.element_size() % 32 == 0 and gate_up.is_contiguous()
            return function(gate_up) if aligned and gate_up.dtype is not torch.float32 else other(gate_up)

        return apply

    has_int8 = capability is None or capability[0] < 10
    return replace(
        ops,
        norms="sgl-kernel",
        products="sgl-kernel" if has_int8 else f"sgl-kernel (int8: {ops.products})",
        rms_norm=norm(library.rmsnorm, ops.rms_norm),
        gemma_rms_norm=norm(library.gemma_rmsnorm, ops.gemma_rms_norm),
        silu_and_mul=gated(library.silu_and_mul, ops.silu_and_mul),
        gelu_tanh_and_mul=gated(library.gelu_tanh_and_mul, ops.gelu_tanh_and_mul),
        gelu_and_mul=gated(library.gelu_and_mul, ops.gelu_and_mul),
        int8_mm=_product(library.int8_scaled_mm, ops.int8_mm) if has_int8 else ops.int8_mm,
        fp8_mm=_product(library.fp8_scaled_mm, ops.fp8_mm),
    )


def _product(function: Callable[..., torch.Tensor], other: ScaledMM) -> ScaledMM:
    def apply(
        a_MK: torch.Tensor,
        b_KN: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
        *,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        aligned = b_KN.shape[0] % SGL_ALIGNMENT == 0 and b_KN.shape[1] % SGL_ALIGNMENT == 0 and a_MK.is_contiguous()
        run = function if aligned and out_dtype.itemsize == 2 else other
        return run(a_MK, b_KN, scale_a, scale_b, out_dtype, bias=bias)

    return apply
