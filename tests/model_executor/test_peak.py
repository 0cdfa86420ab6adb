from __future__ import annotations

import pytest
import torch
from gpu_driver import random_model

from banyan.layers.attention.torch_native import TorchNativeBackend
from banyan.mem_cache.sizing import beside_peak, graph_bytes
from banyan.model_executor import peak
from banyan.model_executor.memory import GraphCount, Peak, fraction_budget
from banyan.model_executor.model_config import load_model_config
from banyan.model_executor.models.registry import model_class
from banyan.model_executor.peak import largest_step, measure_peak
from banyan.model_executor.step import RunnerConfig
from banyan.model_executor.weights import dummy_weights

CPU, GIB, MIB = torch.device("cpu"), 1 << 30, 1 << 20


class Meter:
    """Notes what ran between start and stop."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> int:
        self.calls.append("stop")
        return 12345


@pytest.mark.parametrize(
    ("chunk", "context", "page", "lens"), [(40, 64, 1, [40]), (40, 16, 4, [16, 16, 8]), (32, 16, 16, [16, 16])]
)
@torch.inference_mode()
def test_the_largest_step_runs_through_the_whole_model(chunk, context, page, lens, tmp_path):
    shape = load_model_config(random_model(str(tmp_path), "tiny"), context_length=context)
    model = model_class(shape.architecture)(shape, torch.float32).eval()
    dummy_weights(model, 0)
    meter, pools, seen = Meter(), [], []

    class Backend(TorchNativeBackend):
        def plan(self, batch):
            meter.calls.append("plan")
            seen.append(batch)
            super().plan(batch)

    def make(pool):
        pools.append(pool)
        return Backend(pool)

    config = RunnerConfig(model_path="m", chunked_prefill_size=chunk, page_size=page)
    kinds = {"kv_dtype": torch.float32, "compute": torch.float32, "device": CPU}
    assert measure_peak(model, make, config=config, shape=shape, meter=meter, **kinds) == Peak(12345, chunk)
    assert meter.calls == ["start", "plan", "stop"] and seen[0].seq_lens_host.tolist() == lens
    assert all(bool(pools[0].k(layer)[page : page + chunk].any(-1).all()) for layer in range(shape.num_hidden_layers))
    assert seen[0].positions.tolist() == [i for length in lens for i in range(length)]


def test_a_step_that_does_not_fit_says_what_helps(tmp_path, monkeypatch):
    shape = load_model_config(random_model(str(tmp_path), "tiny"))

    def fail(**_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(peak, "KVPool", fail)
    model = model_class(shape.architecture)(shape, torch.float32)
    kinds = {"kv_dtype": torch.float32, "compute": torch.float32, "device": CPU, "meter": Meter()}
    with pytest.raises(ValueError, match="a step of 40 tokens does not fit into memory; a lower chunked_prefill_size may"):
        measure_peak(model, TorchNativeBackend, config=RunnerConfig(model_path="m", chunked_prefill_size=40), shape=shape, **kinds)


@pytest.mark.parametrize(("chunk", "tokens"), [(None, 4096), (512, 512), (-1, 16384)])
def test_the_largest_step(chunk, tokens):
    assert largest_step(RunnerConfig(model_path="m", chunked_prefill_size=chunk)) == tokens


def budget(peak_bytes: int | None, graphs: GraphCount | None = None, **config) -> tuple[int, str]:
    found = None if peak_bytes is None else Peak(peak_bytes, 4096)
    runner = RunnerConfig(model_path="m", **config)
    return fraction_budget(runner, total=80 * GIB, free=(78 * GIB, 62 * GIB), peak=found, graphs=graphs or GraphCount())


def test_the_peak_lowers_what_the_fraction_leaves_and_never_raises_it():
    plain, why = budget(None, mem_fraction_static=0.95)
    assert plain == int(62 * GIB - 78 * GIB * (1 - 0.95)) and why.startswith("mem_fraction_static 0.95 (as given)")
    same, why = budget(2 * GIB, mem_fraction_static=0.95)
    assert same == plain and why.endswith("a step of 4096 tokens was measured to take 2.00 GiB")
    less, why = budget(5 * GIB, GraphCount(256, 42), mem_fraction_static=0.95)
    assert less == 62 * GIB - 5 * GIB - (512 + 336) * MIB - 512 * MIB and "would leave too little" in why
    assert budget(70 * GIB, mem_fraction_static=0.95)[0] == 0


def test_graphs_lower_the_derived_fraction():
    small = {"chunked_prefill_size": 16384}
    few, many = (budget(None, GraphCount(size, 0), **small)[0] for size in (0, 8192))
    assert "(derived)" in budget(None)[1] and few > many
    assert budget(None, GraphCount(0, 2000), **small)[0] < few
    assert graph_bytes(max_decode_batch=256, num_prefill_graphs=42) == (512 + 336) * MIB
    assert beside_peak(free_after_load=100, peak=30, graphs=20, margin=10) == 40
