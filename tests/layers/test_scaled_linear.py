from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from banyan.layers.embedding import Embedding
from banyan.layers.kernels.cpu.packed import Kind
from banyan.layers.kernels.ops import TORCH
from banyan.layers.linear import Linear
from banyan.layers.quantization import quantized_values_
from banyan.layers.scaled_linear import DeviceFormat, Int4Linear, ScaledLinear, device_format

ERROR = {"int8": 0.01, "fp8": 0.04, "int4": 0.08}  # of the output, beside its spread


def filled(n: int, k: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> Linear:
    linear = Linear(k, n, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(n)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


@pytest.mark.parametrize("quantization", list(ERROR))
@pytest.mark.parametrize(("n", "k", "bias", "dtype"), [(48, 96, True, torch.float32), (33, 80, False, torch.bfloat16)])
@torch.inference_mode()
def test_a_linear_is_near_its_unquantised_self_and_smaller(quantization, n, k, bias, dtype):
    linear = filled(n, k, bias=bias, dtype=dtype)
    x = torch.randn((7, k), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, bytes_before = linear(x).float(), linear.weight.numel() * linear.weight.element_size()
    linear.pack(DeviceFormat(quantization, TORCH))
    got = linear(x)
    assert got.dtype is dtype and linear.weight.numel() == 0 and linear.scaled is not None
    assert float((got.float() - expected).std() / expected.std()) < ERROR[quantization]
    assert linear.scaled.nbytes < bytes_before * (0.7 if dtype is torch.bfloat16 else 0.35)
    assert linear(x[:0]).shape == (0, n)


@pytest.mark.parametrize(("quantization", "kind"), [("int8", Kind.I8), ("int4", Kind.Q4)])
def test_weights_have_the_values_of_the_cpu_kernels(quantization, kind):
    w = torch.randn((24, 80), generator=torch.Generator().manual_seed(2))
    packed = DeviceFormat(quantization, TORCH).pack(w, None, {})
    x = torch.eye(80)
    values = w.clone()
    quantized_values_(values, kind)
    if isinstance(packed, Int4Linear):
        torch.testing.assert_close(packed(x), values.T, atol=1e-6, rtol=1e-6)
    else:
        torch.testing.assert_close(packed.weight.float() * packed.scale[:, None], values)


def test_the_head_of_int4_is_int8_and_a_tied_table_keeps_its_rows():
    form = DeviceFormat("int4", TORCH)
    assert isinstance(form.pack(torch.randn(8, 64), None, {}), Int4Linear)
    head = filled(8, 64, bias=False)
    head.pack(form, head=True)
    assert isinstance(head.scaled, ScaledLinear) and head.scaled.weight.dtype is torch.int8
    table = Embedding(40, 64, dtype=torch.bfloat16)
    table.weight.copy_(torch.randn(40, 64))
    hidden, rows = torch.randn(3, 64).bfloat16(), table(torch.tensor([3, 9]))
    expected = F.linear(hidden, table.weight)
    table.pack(form, torch.bfloat16)
    assert torch.equal(table(torch.tensor([3, 9])), rows) and table(torch.tensor([3])).dtype is torch.bfloat16
    torch.testing.assert_close(table.project(hidden).float(), expected.float(), atol=0.3, rtol=0.05)
    assert not torch.equal(table.project(hidden), expected)


def test_forms_by_capability():
    assert device_format(None, TORCH, (9, 0)) is None
    assert device_format("fp8", TORCH, (8, 9)) == DeviceFormat("fp8", TORCH)
    with pytest.raises(ValueError, match=r"fp8 needs compute capability 8\.9, this is 8\.0"):
        device_format("fp8", TORCH, (8, 0))
    with pytest.raises(ValueError, match="gguf is for the CPU; on CUDA there are int8, int4, fp8"):
        device_format("gguf", TORCH, (9, 0))
    with pytest.raises(ValueError, match="blocks of a GGUF file"):
        DeviceFormat("int8", TORCH).pack(torch.randn(2, 32), None, {0: object()})
