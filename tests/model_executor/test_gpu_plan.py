from __future__ import annotations

import pytest
import torch

from banyan.layers.kernels.ops import TORCH
from banyan.model_executor import gpu_plan
from banyan.model_executor.gpu_plan import GpuFacts, plan_gpu, refuse_gpu_options
from banyan.model_executor.step import RunnerConfig

EVERYTHING = frozenset({"triton", "flashinfer", "sgl_kernel"})


def facts(capability=(9, 0), gib=139, installed=EVERYTHING, head_dim=128, compute=torch.bfloat16, is_whole=True) -> GpuFacts:
    return GpuFacts(capability, gib << 30, frozenset(installed), head_dim, compute, is_whole)


def config(**values) -> RunnerConfig:
    return RunnerConfig(model_path="m", **values)


def test_a_hopper_gets_fa3_graphs_by_its_memory_and_a_kernel_that_samples(monkeypatch):
    plan = plan_gpu(config(), facts())
    assert (plan.prefill, plan.decode, plan.backend, plan.kv_dtype) == ("fa3", "fa3", "fa3", torch.bfloat16)
    assert plan.graph_sizes[-1] == 256 and plan.explain["cuda_graphs"] == "36 sizes up to 256 (by the size of the GPU's memory)"
    assert plan.prefill_graph_sizes[-1] == 2048
    assert plan.explain["prefill_cuda_graphs"] == "42 sizes up to 2048 tokens, in pieces between attention (default)"
    named = {"attention_backend", "kv_cache_dtype", "cuda_graphs", "prefill_cuda_graphs", "sampling_backend", "fused_ops"}
    assert set(plan.explain) == named


def test_fp8_kv_leads_to_a_backend_that_reads_it():
    plan = plan_gpu(config(kv_cache_dtype="fp8_e4m3"), facts())
    assert (plan.decode, plan.kv_dtype) == ("flashinfer", torch.float8_e4m3fn)


def test_the_wide_fp8_needs_no_conversion_of_the_hardware():
    assert plan_gpu(config(kv_cache_dtype="fp8_e5m2", attention_backend="triton"), facts((8, 0))).kv_dtype is torch.float8_e5m2


def test_phases_apart():
    plan = plan_gpu(config(prefill_attention_backend="flashinfer", decode_attention_backend="triton"), facts())
    assert plan.backend == "flashinfer+triton"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cuda_graph_bs": "4,1,16"}, [1, 4, 16]),
        ({"cuda_graph_bs": "4,1,16", "cuda_graph_max_bs": 8}, [1, 4]),
        ({"cuda_graph_max_bs": 10}, [1, 2, 4, 8, 10]),
        ({"max_running_requests": 3}, [1, 2, 3]),
        ({"disable_cuda_graph": True}, []),
        ({"attention_backend": "torch_native"}, []),
    ],
)
def test_sizes_of_graphs(values, expected):
    assert plan_gpu(config(**values), facts()).graph_sizes == tuple(expected)


@pytest.mark.parametrize(
    ("values", "last"),
    [
        ({"chunked_prefill_size": 512}, 512),
        ({"chunked_prefill_size": -1}, 2048),
        ({"prefill_cuda_graph_max_tokens": 300}, 300),
        ({"disable_cuda_graph": True}, None),
        ({"disable_prefill_cuda_graph": True}, None),
        ({"attention_backend": "torch_native"}, 2048),
    ],
)
def test_sizes_of_graphs_of_prompts(values, last):
    assert plan_gpu(config(**values), facts()).prefill_graph_sizes[-1:] == (() if last is None else (last,))


def test_ranks_turn_graphs_off():
    explain = plan_gpu(config(), facts(is_whole=False)).explain
    assert explain["cuda_graphs"] == explain["prefill_cuda_graphs"] == "off: the model is spread over ranks"


@pytest.mark.parametrize(
    ("values", "given", "message"),
    [
        ({"cuda_graph_bs": "x"}, facts(), "cuda_graph_bs must be positive numbers"),
        ({"cuda_graph_bs": "16", "cuda_graph_max_bs": 8}, facts(), "no size of cuda_graph_bs"),
        ({"cuda_graph_max_bs": 8, "attention_backend": "torch_native"}, facts(), "torch_native cannot be recorded"),
        ({"cuda_graph_max_bs": 8}, facts(is_whole=False), "spread over ranks"),
        ({"prefill_cuda_graph_max_tokens": 8}, facts(is_whole=False), "graphs of prompts were asked for"),
        ({"attention_backend": "fa3"}, facts((10, 0)), "8.x and 9.x, not 10.0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(values, given, message):
    with pytest.raises(ValueError, match=message):
        plan_gpu(config(**values), given)


@pytest.mark.parametrize(
    ("kv", "given", "message"),
    [
        ("int8", facts(), "int8' is not for GPUs"),
        ("fp8_e4m3", facts((8, 0)), "needs compute capability 8.9, this is 8.0"),
        ("float32", facts(), "activations, which are bfloat16"),
    ],
)
def test_kv_that_cannot_be_is_refused(kv, given, message):
    with pytest.raises(ValueError, match=message):
        plan_gpu(config(kv_cache_dtype=kv), given)


def test_a_given_backend_must_read_the_kv():
    with pytest.raises(ValueError, match="fa3 does not read fp8 KV"):
        plan_gpu(config(attention_backend="fa3", kv_cache_dtype="fp8_e4m3"), facts())


@pytest.mark.parametrize("option", ["prefill_attention_backend", "sampling_backend", "cuda_graph_bs"])
def test_a_cpu_refuses_what_only_a_gpu_has(option):
    with pytest.raises(ValueError, match=f"{option} is for CUDA devices"):
        refuse_gpu_options(config(**{option: "triton"}))


def test_torch_samples_where_it_is_asked_for():
    plan = plan_gpu(config(sampling_backend="pytorch"), facts())
    assert plan.draw is None and plan.explain["sampling_backend"] == "pytorch (as given)"


def test_without_triton_torch_samples_and_triton_cannot(monkeypatch):
    monkeypatch.setattr(gpu_plan, "ops_of", lambda device: TORCH)
    assert plan_gpu(config(), facts()).explain["sampling_backend"] == "pytorch (triton is not installed)"
    with pytest.raises(ValueError, match="triton is not installed"):
        plan_gpu(config(sampling_backend="triton"), facts())
