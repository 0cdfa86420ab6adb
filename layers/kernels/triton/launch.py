"""The Triton kernels as functions of tensors: shapes, strides and block sizes."""

from __future__ import annotations

import torch
import triton

from .fused import gated_kernel, rms_norm_kernel, rotate_kernel
from .gemm import int4_mm_kernel, quantize_kernel, scaled_mm_kernel
from .sampling import sample_kernel

SAMPLE_BLOCK = 2048  # logits of a row that a program holds at once
MAX_NORM_DIM = 1 << 15


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ops.FusedOps.rms_norm."""
    return _norm(x, None, weight, eps, gemma=False)[0]


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ops.FusedOps.gemma_rms_norm."""
    return _norm(x, None, weight, eps, gemma=True)[0]


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.FusedOps.add_rms_norm."""
    return _norm(x, delta, weight, eps, gemma=False)


def gemma_add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.FusedOps.gemma_add_rms_norm."""
    return _norm(x, delta, weight, eps, gemma=True)


def _norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, *, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dim = x.shape[-1]
    if x.stride(-1) != 1 or dim > MAX_NORM_DIM or (delta is not None and delta.stride(-1) != 1):
        raise ValueError(f"a norm takes up to {MAX_NORM_DIM} contiguous values, not {dim} with stride {x.stride(-1)}")
    heads = x.shape[-2] if x.ndim == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if delta is None else torch.empty_like(out)
    block = triton.next_power_of_2(dim)
    rms_norm_kernel[(x.shape[0] * heads,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        total,
        eps,
        x.stride(0),
        x.stride(-2),
        0 if delta is None else delta.stride(0),
        HEADS=heads,
        D=dim,
        BLOCK=block,
        ADD=delta is not None,
        GEMMA=gemma,
        num_warps=min(16, max(1, block // 512)),
    )
    return out, total


def rotate(x_THD: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """As rotary.rotate."""
    cos, sin = tables
    tokens, heads, dim = x_THD.shape
    if x_THD.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("the dims of a head and the tables must be contiguous")
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    rotate_kernel[(tokens,)](
        x_THD,
        cos,
        sin,
        out,
        x_THD.stride(0),
        x_THD.stride(1),
        HEADS=heads,
        R=dim // 2,
        BLOCK_H=min(16, triton.next_power_of_2(heads)),
        BLOCK_R=triton.next_power_of_2(dim // 2),
    )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> [T, I]."""
    return _gated(gate_up, silu=True)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> [T, I]."""
    return _gated(gate_up, silu=False)


def _gated(gate_up: torch.Tensor, *, silu: bool) -> torch.Tensor:
    if gate_up.stride(-1) != 1:
        raise ValueError("gate and up must be contiguous")
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(tokens, triton.cdiv(inner, 1024))](gate_up, out, gate_up.stride(0), inner, BLOCK=1024, SILU=silu)
    return out


def scaled_mm(
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ops.FusedOps.int8_mm and fp8_mm."""
    tokens, inner = a_MK.shape
    features = b_KN.shape[1]
    if a_MK.stride(1) != 1 or b_KN.stride(0) != 1:
        raise ValueError("the inner dim of both factors must be contiguous")
    out = torch.empty((tokens, features), dtype=out_dtype, device=a_MK.device)
    block_m = 16 if tokens <= 16 else 64
    grid = (triton.cdiv(tokens, block_m), triton.cdiv(features, 128))
    scaled_mm_kernel[grid](
        a_MK,
        b_KN,
        scale_a,
        scale_b,
        out if bias is None else bias,
        out,
        tokens,
        features,
        inner,
        a_MK.stride(0),
        b_KN.stride(1),
        out.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=128,
        BLOCK_K=128,
        INTEGER=a_MK.dtype is torch.int8,
        BIAS=bias is not None,
        num_stages=3,
    )
    return out


def quantize(x_TK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.FusedOps.quantize."""
    tokens, inner = x_TK.shape
    if x_TK.stride(1) != 1 or inner > MAX_NORM_DIM:
        raise ValueError(f"a row must be contiguous and of up to {MAX_NORM_DIM} values, not {inner} with stride {x_TK.stride(1)}")
    out = torch.empty((tokens, inner), dtype=dtype, device=x_TK.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x_TK.device)
    integer, block = dtype is torch.int8, triton.next_power_of_2(inner)
    limit = 127.0 if integer else torch.finfo(dtype).max
    quantize_kernel[(tokens,)](
        x_TK, out, scale, inner, x_TK.stride(0), LIMIT=limit, INTEGER=integer, BLOCK=block, num_warps=min(16, max(1, block // 512))
    )
    return out, scale


def int4_mm(
    x_MK: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor,
    *,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ops.FusedOps.int4_mm."""
    tokens, inner = x_MK.shape
    features = packed.shape[0]
    factors = (packed, scales, minimums)
    if x_MK.stride(1) != 1 or not all(x.is_contiguous() for x in factors) or inner % group or group < 32:
        raise ValueError(f"int4_mm takes contiguous factors whose {inner} values divide into groups of 32 or more, not {group}")
    out = torch.empty((tokens, features), dtype=x_MK.dtype, device=x_MK.device)
    block_m = 16 if tokens <= 16 else 64
    int4_mm_kernel[(triton.cdiv(tokens, block_m), triton.cdiv(features, 64))](
        x_MK,
        packed,
        scales,
        minimums,
        out if bias is None else bias,
        out,
        tokens,
        features,
        inner,
        x_MK.stride(0),
        out.stride(0),
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=64,
        BIAS=bias is not None,
        num_stages=3,
    )
    return out


def sample(logits_SV: torch.Tensor, best: torch.Tensor, params_5S: torch.Tensor) -> torch.Tensor:
    """int64 [S]: what each row draws. params: float64 temperature, top_p, min_p, top_k and uniform of each row."""
    rows, vocabulary = logits_SV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    block = min(SAMPLE_BLOCK, triton.next_power_of_2(vocabulary))
    sample_kernel[(rows,)](
        logits_SV, best, params_5S, out, rows, vocabulary, logits_SV.stride(0), BLOCK=block, num_warps=max(1, block // 256)
    )
    return out
