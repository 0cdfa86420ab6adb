"""The small parts of the runner: future map, device, dtype, memory, weights."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from banyan.model_executor import device as device_module
from banyan.model_executor import memory
from banyan.model_executor.device import create_device, num_compute_threads
from banyan.model_executor.dtype import choose_dtype
from banyan.model_executor.future_map import FutureMap
from banyan.model_executor.model_config import ModelConfig, parse_config
from banyan.model_executor.models.registry import model_class
from banyan.model_executor.step import RunnerConfig

CPU = torch.device("cpu")
GIB = 1 << 30


# --- future map -------------------------------------------------------------------------------------------------------------------


def test_placeholders_become_what_their_row_sampled_last():
    futures = FutureMap(6, CPU)
    futures.publish(torch.tensor([5, 1]), torch.tensor([50, 10]))
    futures.publish(torch.tensor([1]), torch.tensor([11]))
    ids = torch.tensor([7, -1, 0, -5, -1])
    assert futures.resolve(ids).tolist() == [7, 11, 0, 50, 11]
    assert ids.tolist() == [7, -1, 0, -5, -1]


def test_a_failed_row_resolves_to_a_valid_id():
    futures = FutureMap(3, CPU)
    futures.publish(torch.tensor([2]), torch.tensor([-1]))
    assert futures.resolve(torch.tensor([-2])).tolist() == [0]


# --- device -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_all_work_runs_in_order_on_one_thread(overlap):
    device = create_device("cpu", overlap=overlap)
    seen: list[tuple[int, int]] = []

    def step(i: int) -> list[torch.Tensor]:
        seen.append((i, threading.get_ident()))
        return [torch.tensor([i])]

    handles = [device.submit(lambda i=i: step(i)) for i in range(20)]
    thread = device.run(threading.get_ident)
    assert [handle.wait().next_ids.tolist() for handle in handles] == [[i] for i in range(20)]
    assert seen == [(i, thread) for i in range(20)]
    assert (thread == threading.get_ident()) is not overlap
    device.close()
    device.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_step_raises_travels_through_wait_and_the_next_step_runs(overlap):
    device = create_device("cpu", overlap=overlap)

    def broken() -> list[torch.Tensor]:
        raise ZeroDivisionError("in the step")

    bad, good = device.submit(broken), device.submit(lambda: [torch.tensor([4])])
    with pytest.raises(ZeroDivisionError, match="in the step"):
        bad.wait()
    assert bad.done() and good.wait().next_ids.tolist() == [4]
    with pytest.raises(ZeroDivisionError):
        device.run(broken)
    device.close()


def test_a_step_is_not_done_before_it_ends():
    device = create_device("cpu", overlap=True)
    gate = threading.Event()

    def step() -> list[torch.Tensor]:
        gate.wait()
        return [torch.tensor([1])]

    handle = device.submit(step)
    assert not handle.done()
    gate.set()
    assert handle.wait().next_ids.tolist() == [1] and handle.done()
    device.close()


def test_threads_are_the_physical_cores_that_are_allowed(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device_module.os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    monkeypatch.setattr(device_module, "_siblings", lambda cpu: str(cpu // 2))
    assert num_compute_threads()[0] == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert num_compute_threads() == (7, "OMP_NUM_THREADS")


# --- dtype ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "saved", "flags", "expected"),
    [
        ("auto", "bfloat16", {"avx512_bf16"}, torch.bfloat16),
        ("auto", "bfloat16", {"amx_bf16"}, torch.bfloat16),
        ("auto", "bfloat16", {"avx512_f"}, torch.float32),
        ("auto", "float16", {"avx512_bf16"}, torch.float32),
        ("auto", "float16", {"avx512_fp16"}, torch.float16),
        ("auto", "float32", {"avx512_bf16"}, torch.float32),
        ("bfloat16", "float32", set(), torch.bfloat16),
    ],
)
def test_auto_dtype_is_the_checkpoints_where_the_cpu_multiplies_it(wanted, saved, flags, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(flags, True))
    dtype, why = choose_dtype(wanted, saved, CPU)
    assert dtype is expected and why.startswith(str(expected).removeprefix("torch."))


# --- memory -----------------------------------------------------------------------------------------------------------------------


def tiny_model() -> ModelConfig:
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 100,
            "max_position_embeddings": 1024,
        }
    )


PER_TOKEN = 2 * 4 * 2 * 16 * 4


def tokens(monkeypatch, free: int, before: int | None = None, **config) -> int:
    monkeypatch.setattr(memory, "available_memory", lambda device: free)
    before = free if before is None else before
    runner = RunnerConfig(model_path="x", **config)
    return memory.cache_tokens(runner, tiny_model(), dtype=torch.float32, device=CPU, free_before_load=before)[0]


def test_the_default_pool_on_a_cpu_is_modest(monkeypatch):
    assert tokens(monkeypatch, 100 * GIB) == memory.CPU_FULL_REQUESTS * 1024
    assert tokens(monkeypatch, 100 * GIB, max_running_requests=3, page_size=16) == 3 * 1024
    assert tokens(monkeypatch, 1000 * PER_TOKEN) == 299  # 30 %, less the scratch page
    assert tokens(monkeypatch, 1000 * PER_TOKEN, page_size=16) == 272


def test_mem_fraction_is_of_what_was_free_before_loading(monkeypatch):
    got = tokens(monkeypatch, 600 * PER_TOKEN, before=1000 * PER_TOKEN, mem_fraction_static=0.8)
    assert got in (398, 399)  # 600 - 20 % of 1000, less the scratch page
    with pytest.raises(ValueError, match="mem_fraction_static must be between 0 and 1"):
        tokens(monkeypatch, GIB, mem_fraction_static=1.5)


def test_a_given_pool_is_taken_in_whole_pages(monkeypatch):
    assert tokens(monkeypatch, GIB, max_total_tokens=50, page_size=16) == 48
    with pytest.raises(ValueError, match="less than one page"):
        tokens(monkeypatch, GIB, max_total_tokens=15, page_size=16)
    with pytest.raises(ValueError, match="GiB are available"):
        tokens(monkeypatch, 100 * PER_TOKEN, max_total_tokens=100)


def test_too_little_memory_is_a_clear_error(monkeypatch):
    with pytest.raises(ValueError, match=r"not enough memory for KV.*at least 128 are needed"):
        tokens(monkeypatch, 200 * PER_TOKEN)
    with pytest.raises(ValueError, match="not enough memory"):
        tokens(monkeypatch, 100 * PER_TOKEN, before=1000 * PER_TOKEN, mem_fraction_static=0.5)


def write_group(folder: Path, names: tuple[str, str, str], limit: object, usage: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\n")


def test_the_tightest_limit_of_nested_cgroups_counts(tmp_path):
    root, proc = tmp_path / "cgroup", tmp_path / "self"
    v2 = ("memory.max", "memory.current", "inactive_file")
    proc.write_text("0::/a/b\n")
    write_group(root / "a" / "b", v2, "max", 10, 0)
    write_group(root / "a", v2, 1000, 700, 200)
    assert memory.cgroup_available(root, proc) == 500
    write_group(root / "a" / "b", v2, 400, 300, 0)
    assert memory.cgroup_available(root, proc) == 100
    proc.write_text("4:memory:/c\n3:cpu:/c\n0::/\n")
    write_group(root / "memory" / "c", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), 90, 50, 5)
    assert memory.cgroup_available(root, proc) == 45
    assert memory.cgroup_available(root, tmp_path / "none") is None
    proc.write_text("0::/elsewhere\n")
    assert memory.cgroup_available(root, proc) is None


# --- registry ---------------------------------------------------------------------------------------------------------------------


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"BertModel is not supported; supported are LlamaForCausalLM"):
        model_class("BertModel")
