from __future__ import annotations

import gpu_stand_ins
import pytest
import torch

from banyan.layers.kernels import ops

NEAR = {"atol": 1e-2, "rtol": 1e-2}


def test_a_cpu_uses_torch_itself():
    assert ops.ops_of("cpu") is ops.TORCH and ops.current_ops() is ops.TORCH


def test_a_gpu_takes_the_best_that_is_installed(monkeypatch):
    installed = {"triton"}
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(ops, "triton_ops", lambda: ops.TORCH)
    gpu_stand_ins.install(monkeypatch)

    def chosen() -> str:
        ops.ops_of.cache_clear()
        return ops.ops_of("cuda").norms

    try:
        assert chosen() == "torch"  # what stands for Triton's here
        installed.add("sgl_kernel")
        assert chosen() == "sgl-kernel"
        installed.clear()
        assert chosen() == "torch" and ops.ops_of("cuda") is ops.TORCH
    finally:
        ops.ops_of.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sgl_kernel_means_the_same_and_leaves_what_it_cannot(dtype, monkeypatch):
    gpu_stand_ins.install(monkeypatch)
    gpu_stand_ins.CALLED.clear()
    fused = ops.with_sgl_kernel(ops.TORCH)
    x, w, wide = torch.randn(3, 64).to(dtype), torch.randn(64).to(dtype), torch.randn(3, 128).to(dtype)
    for name in ("rms_norm", "gemma_rms_norm"):
        torch.testing.assert_close(getattr(fused, name)(x, w, 1e-5), getattr(ops.TORCH, name)(x, w, 1e-5), **NEAR)
        heads = torch.randn(3, 4, 64).to(dtype)
        assert torch.equal(getattr(fused, name)(heads, w, 1e-5), getattr(ops.TORCH, name)(heads, w, 1e-5))
    for name in ("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"):
        torch.testing.assert_close(getattr(fused, name)(wide), getattr(ops.TORCH, name)(wide), **NEAR)
    names = {"rmsnorm", "gemma_rmsnorm", "silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"}
    assert {f"sgl_kernel.{name}" for name in names} == gpu_stand_ins.CALLED or (dtype is torch.float32 and not gpu_stand_ins.CALLED)


def test_products_of_sgl_kernel_take_our_arguments(monkeypatch):
    gpu_stand_ins.install(monkeypatch)
    fused = ops.with_sgl_kernel(ops.TORCH)
    a, b = torch.randint(-9, 9, (2, 32), dtype=torch.int8), torch.randint(-9, 9, (16, 32), dtype=torch.int8).T
    args = (a, b, torch.rand(2), torch.rand(16), torch.bfloat16)
    bias = torch.rand(16).bfloat16()
    gpu_stand_ins.CALLED.clear()
    assert torch.equal(fused.int8_mm(*args, bias=bias), ops.scaled_mm(*args, bias=bias))
    f8 = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), *args[2:])
    assert torch.equal(fused.fp8_mm(*f8), ops.scaled_mm(*f8))
    assert {"sgl_kernel.int8_scaled_mm", "sgl_kernel.fp8_scaled_mm"} == gpu_stand_ins.CALLED


@pytest.mark.parametrize(("n", "k", "dtype"), [(16, 24, torch.bfloat16), (9, 32, torch.bfloat16), (16, 32, torch.float32)])
def test_products_that_sgl_kernel_does_not_take_go_elsewhere(n, k, dtype, monkeypatch):
    gpu_stand_ins.install(monkeypatch)
    gpu_stand_ins.CALLED.clear()
    fused = ops.with_sgl_kernel(ops.TORCH)
    a, b = torch.randint(-9, 9, (2, k), dtype=torch.int8), torch.randint(-9, 9, (n, k), dtype=torch.int8).T
    args = (a, b, torch.rand(2), torch.rand(n), dtype)
    assert torch.equal(fused.int8_mm(*args), ops.scaled_mm(*args)) and not gpu_stand_ins.CALLED


def test_sgl_kernel_has_no_int8_product_for_blackwell(monkeypatch):
    gpu_stand_ins.install(monkeypatch)
    fused = ops.with_sgl_kernel(ops.TORCH, (10, 0))
    assert fused.int8_mm is ops.TORCH.int8_mm and fused.products == "sgl-kernel (int8: torch)"
    assert ops.with_sgl_kernel(ops.TORCH, (9, 0)).products == "sgl-kernel"


def test_int4_weights_survive_packing():
    nibbles = torch.randint(0, 16, (5, 64))
    packed = ops.pack_int4(nibbles, 32)
    assert packed.shape == (5, 32) and packed.dtype is torch.uint8
    scales, minimums = torch.rand(5, 2), torch.randn(5, 2)
    weight = nibbles.float() * scales.repeat_interleave(32, 1) + minimums.repeat_interleave(32, 1)
    x = torch.randn(3, 64)
    torch.testing.assert_close(ops.int4_mm(x, packed, scales, minimums, group=32), x @ weight.T)
