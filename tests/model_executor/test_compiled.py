"""torch.compile on the CPU: the same tokens, whatever the compiler's backend."""

from __future__ import annotations

import pytest
import torch
from gpu_driver import Driver, random_model

from banyan.layers.kernels import ops
from banyan.layers.kernels.cpu.library import NotNative
from banyan.model_executor import compiled, weight_form
from banyan.model_executor.step import RankSpec, RunnerConfig

LENS = [20, 3, 9]


@pytest.fixture
def generate(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_form, "native_kernels", lambda: NotNative("off: a test wants it so"))
    path = random_model(str(tmp_path), "tiny")

    def run(**config) -> tuple[list[list[int]], str]:
        torch.compiler.reset()
        with Driver(path, dry=True, dtype="float32", page_size=4, **config) as driver:
            return driver.generate(LENS, 4), driver.runner.info.explain["forward"]

    yield run
    torch.compiler.reset()


def check(generate, monkeypatch, backend: str) -> None:
    plain, why = generate()
    assert why.startswith("module by module")
    frames = []

    def counting(graph, inputs):
        frames.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    monkeypatch.setattr(compiled, "BACKEND", counting)
    ids, why = generate(enable_torch_compile=True, torch_compile_max_bs=4)
    assert ids == plain and why == "compiled between layers' attention for steps of up to 4 tokens"
    assert 0 < len(frames) <= 24, "layers share what is compiled, and so do steps of any number of tokens"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_steps_give_the_same_tokens(backend, generate, monkeypatch):
    check(generate, monkeypatch, backend)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"native": True}, "the native CPU kernels compute the layers"),
        ({"quantization": "int8"}, "int8 has kernels of its own"),
        ({"ranks": RankSpec(tp_size=2)}, "spread over ranks"),
        ({"enable_deterministic_inference": True}, "fixes the order of sums"),
        ({"enable_torch_compile": False, "torch_compile_max_bs": 3}, "means nothing without enable_torch_compile"),
    ],
)
def test_what_cannot_be_compiled_is_refused(values, message):
    native = values.pop("native", False)
    with pytest.raises(ValueError, match=message):
        compiled.check_compile(RunnerConfig(model_path="m", **{"enable_torch_compile": True} | values), native=native)


def test_layers_of_a_compiled_model_hand_torch_what_it_can_fuse(monkeypatch):
    calls = []
    fused = ops.replace(ops.TORCH, rms_norm=lambda *args: calls.append("fused") or ops.rms_norm(*args))
    monkeypatch.setattr(ops, "ops_of", lambda device: fused)
    with ops.traceable_ops():
        norm, turn = ops.current_ops().rms_norm, ops.current_ops().rotate
    x, w = torch.randn(3, 8), torch.ones(8)
    torch.testing.assert_close(norm(x, w, 1e-5), ops.rms_norm(x, w, 1e-5))
    assert calls == ["fused"] and ops.current_ops() is fused
    heads, tables = torch.randn(3, 2, 8), (torch.randn(3, 1, 4), torch.randn(3, 1, 4))
    plain = turn(heads, tables)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    norm(x, w, 1e-5)
    torch.testing.assert_close(turn(heads, tables), plain)
    assert calls == ["fused"]
