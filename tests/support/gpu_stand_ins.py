"""flashinfer and sgl_kernel without a GPU: each call binds its arguments to the real function's recorded signature, then computes
the same in torch, one request at a time. So a test checks our calls and what we make of their results."""

from __future__ import annotations

import itertools
import math
import sys
import types
from typing import Any

import gpu_signatures
import torch
import torch.nn.functional as F

SIGNATURES = gpu_signatures.recorded()
CALLED: set[str] = set()


def bound(call: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by name. Raises TypeError for a call that the real function does not take."""
    CALLED.add(call)
    return dict(SIGNATURES[call].bind(*args, **kwargs).arguments)


def attend(q, k, v, *, scale: float, cap: float | None, left: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """([Q, H, D], natural log-sum-exp [Q, H]) of one request; queries are aligned to the end of the keys."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    position = torch.arange(len(q))[:, None] + len(k) - len(q)
    distance = position - torch.arange(len(k))[None]
    hidden = torch.zeros(distance.shape, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    scores = scores.masked_fill(hidden, -math.inf)
    if len(k) == 0:
        return torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def _pages(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    return cache[pages.long()].flatten(0, 1)[:length]


class _Wrapper:
    NAME = ""
    DECODE = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = bound(f"flashinfer.{self.NAME}.__init__", self, *args, **kwargs)
        assert own["kv_layout"] == "NHD" and own["float_workspace_buffer"].dtype is torch.uint8
        self._own, self._plan = own, {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        plan = bound(f"flashinfer.{self.NAME}.plan", self, *args, **kwargs)
        assert all(plan[name].dtype is torch.int32 for name in plan if "indptr" in name or "indices" in name or "last" in name)
        if self._own.get("use_cuda_graph"):  # as the real one: copies into the buffers, which must hold it
            self._own["paged_kv_indptr_buffer"].copy_(plan["indptr"])
            self._own["paged_kv_last_page_len_buffer"].copy_(plan["last_page_len"])
            self._own["paged_kv_indices_buffer"][: len(plan["indices"])].copy_(plan["indices"])
        self._plan = plan

    def _attend(self, q, k, v, causal: bool):
        plan = self._plan
        window = plan.get("window_left", -1)
        return attend(q, k, v, scale=plan["sm_scale"], cap=plan.get("logits_soft_cap"), left=window, causal=causal)

    def _results(self, q, results, return_lse):
        out = torch.cat([out for out, _ in results]).to(q.dtype)
        lse = torch.cat([lse for _, lse in results]).float() / math.log(2)
        return (out, lse) if return_lse else out

    def _run_paged(self, q, cache, q_indptr, causal: bool, return_lse: bool):
        plan = self._plan
        indptr = plan.get("paged_kv_indptr", plan.get("indptr"))
        indices = plan.get("paged_kv_indices", plan.get("indices"))
        last = plan.get("paged_kv_last_page_len", plan.get("last_page_len"))
        k_cache, v_cache = cache
        assert k_cache.shape[1:] == (plan["page_size"], plan["num_kv_heads"], k_cache.shape[3])
        results = []
        for b in range(len(indptr) - 1):
            pages = indices[int(indptr[b]) : int(indptr[b + 1])]
            length = max(0, (len(pages) - 1) * plan["page_size"]) + int(last[b])
            k, v = _pages(k_cache, pages, length), _pages(v_cache, pages, length)
            results.append(self._attend(q[int(q_indptr[b]) : int(q_indptr[b + 1])], k, v, causal))
        return self._results(q, results, return_lse)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    NAME = "BatchDecodeWithPagedKVCacheWrapper"

    def run(self, *args: Any, **kwargs: Any):
        own = bound(f"flashinfer.{self.NAME}.run", self, *args, **kwargs)
        return self._run_paged(own["q"], own["paged_kv_cache"], range(len(own["q"]) + 1), True, own.get("return_lse", False))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    NAME = "BatchPrefillWithPagedKVCacheWrapper"

    def run(self, *args: Any, **kwargs: Any):
        own = bound(f"flashinfer.{self.NAME}.run", self, *args, **kwargs)
        plan = self._plan
        return self._run_paged(
            own["q"], own["paged_kv_cache"], plan["qo_indptr"], plan.get("causal", False), own.get("return_lse", False)
        )


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    NAME = "BatchPrefillWithRaggedKVCacheWrapper"

    def run(self, *args: Any, **kwargs: Any):
        own = bound(f"flashinfer.{self.NAME}.run", self, *args, **kwargs)
        q_at, kv_at = self._plan["qo_indptr"].tolist(), self._plan["kv_indptr"].tolist()
        results = [
            self._attend(own["q"][q0:q1], own["k"][k0:k1], own["v"][k0:k1], self._plan.get("causal", False))
            for q0, q1, k0, k1 in zip(q_at, q_at[1:], kv_at, kv_at[1:], strict=False)
        ]
        return self._results(own["q"], results, own.get("return_lse", False))


def merge_state(*args: Any, **kwargs: Any):
    own = bound("flashinfer.merge_state", *args, **kwargs)
    a, b = own["s_a"].double(), own["s_b"].double()
    lse = torch.logaddexp2(a, b)
    weights = [torch.exp2(s - lse)[..., None] for s in (a, b)]
    return (own["v_a"].double() * weights[0] + own["v_b"].double() * weights[1]).to(own["v_a"].dtype), lse.float()


def flash_attn_with_kvcache(*args: Any, **kwargs: Any):
    own = bound("sgl_kernel.flash_attn.flash_attn_with_kvcache", *args, **kwargs)
    assert own["causal"] and own["ver"] == 3
    assert all(own[name].dtype is torch.int32 for name in ("cache_seqlens", "page_table", "cu_seqlens_q"))
    left, right = own["window_size"]
    assert right == (-1 if left < 0 else 0)
    at = own["cu_seqlens_q"].tolist()
    assert own["max_seqlen_q"] == max(b - a for a, b in itertools.pairwise(at))
    results = []
    for b, length in enumerate(own["cache_seqlens"].tolist()):
        page = own["k_cache"].shape[1]
        pages = own["page_table"][b][: -(-length // page)]
        k, v = _pages(own["k_cache"], pages, length), _pages(own["v_cache"], pages, length)
        q = own["q"][at[b] : at[b + 1]]
        results.append(attend(q, k, v, scale=own["softmax_scale"], cap=own["softcap"], left=left, causal=True)[0])
    return torch.cat(results).to(own["q"].dtype)


def _rows(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w).to(torch.bfloat16)


def rmsnorm(*args: Any, **kwargs: Any):
    own = bound("sgl_kernel.rmsnorm", *args, **kwargs)
    return _rows(own["input"], own["weight"].float(), own["eps"])


def gemma_rmsnorm(*args: Any, **kwargs: Any):
    own = bound("sgl_kernel.gemma_rmsnorm", *args, **kwargs)
    return _rows(own["input"], 1 + own["weight"].float(), own["eps"])


def _gated(name: str, act):
    def apply(*args: Any, **kwargs: Any):
        own = bound(f"sgl_kernel.{name}", *args, **kwargs)
        gate, up = own["input"].float().chunk(2, -1)
        return (act(gate) * up).to(own["input"].dtype)

    return apply


def _product(name: str):
    def apply(*args: Any, **kwargs: Any):
        own = bound(f"sgl_kernel.{name}", *args, **kwargs)
        out = own["mat_a"].float() @ own["mat_b"].float() * own["scales_a"][:, None] * own["scales_b"][None]
        return (out if own.get("bias") is None else out + own["bias"].float()).to(own["out_dtype"])

    return apply


def install(monkeypatch: Any) -> None:
    """Put the stand-ins where imports find them."""
    flashinfer: Any = types.ModuleType("flashinfer")
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper):
        setattr(flashinfer, wrapper.NAME, wrapper)
    flashinfer.merge_state = merge_state
    sgl_kernel: Any = types.ModuleType("sgl_kernel")
    sgl_kernel.flash_attn = types.ModuleType("sgl_kernel.flash_attn")
    sgl_kernel.flash_attn.flash_attn_with_kvcache = flash_attn_with_kvcache
    sgl_kernel.rmsnorm, sgl_kernel.gemma_rmsnorm = rmsnorm, gemma_rmsnorm
    sgl_kernel.silu_and_mul = _gated("silu_and_mul", F.silu)
    sgl_kernel.gelu_and_mul = _gated("gelu_and_mul", F.gelu)
    sgl_kernel.gelu_tanh_and_mul = _gated("gelu_tanh_and_mul", lambda x: F.gelu(x, approximate="tanh"))
    sgl_kernel.int8_scaled_mm, sgl_kernel.fp8_scaled_mm = _product("int8_scaled_mm"), _product("fp8_scaled_mm")
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "sgl_kernel", sgl_kernel)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", sgl_kernel.flash_attn)
