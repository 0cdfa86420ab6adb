from __future__ import annotations

import pytest
import torch
from gpu_driver import Driver, random_model

from banyan.layers import onednn
from banyan.layers.kernels.cpu.library import NotNative
from banyan.layers.kernels.ops import TORCH
from banyan.layers.linear import Linear
from banyan.layers.scaled_linear import DeviceFormat
from banyan.model_executor import model_runner, weight_form
from banyan.model_executor.step import RunnerConfig


@pytest.fixture
def first_logits(tmp_path, monkeypatch):
    """Logits behind a prompt, of a tiny random model whose linears are in a device's form; torch computes."""
    monkeypatch.setattr(weight_form, "native_kernels", lambda: NotNative("off: a test wants it so"))
    path = random_model(str(tmp_path), "tiny")

    def run(form: DeviceFormat | None) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        sample = model_runner.sample
        with monkeypatch.context() as patch:
            patch.setattr(weight_form, "weight_format", lambda *_: form)
            patch.setattr(
                model_runner, "sample", lambda logits, *rest, **kw: (seen.append(logits.clone()), sample(logits, *rest))[1]
            )
            with Driver(path, dry=True, dtype="float32", attention_backend="torch_native") as driver:
                driver.generate([40, 7], 2)
        return torch.cat(seen)

    return run


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.03), ("fp8", 0.15), ("int4", 0.25)])
def test_a_quantised_model_is_near_itself(quantization, error, first_logits):
    plain, got = first_logits(None), first_logits(DeviceFormat(quantization, TORCH))
    gap = float((got[:2] - plain[:2]).std() / plain[:2].std())
    assert 0 < gap < error


def plan(monkeypatch, capability: tuple[int, int], **config) -> weight_form.WeightPlan:
    monkeypatch.setattr(weight_form.torch.cuda, "get_device_capability", lambda device: capability)
    return weight_form.plan_weights(RunnerConfig(model_path="m", dtype="float16", **config), "float16", torch.device("cuda"))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_gpu_takes_its_own_forms(quantization, monkeypatch):
    found = plan(monkeypatch, (9, 0), quantization=quantization)
    assert isinstance(found.form, DeviceFormat) and found.form.quantization == quantization
    assert found.explain["weights"].startswith(f"quantization {quantization}, multiplied by ") and not found.keep_blocks
    assert plan(monkeypatch, (9, 0)).form is None


def test_what_a_device_cannot_have_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="fp8 needs compute capability 8"):
        plan(monkeypatch, (8, 0), quantization="fp8")
    with pytest.raises(ValueError, match="gguf needs a GGUF file"):
        plan(monkeypatch, (9, 0), quantization="gguf")
    with pytest.raises(ValueError, match="fp8 is for CUDA devices, this is a CPU"):
        weight_form.plan_weights(RunnerConfig(model_path="m", quantization="fp8"), "float16", torch.device("cpu"))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_torch_multiplies_by_reordered_weights(quantization, tmp_path, monkeypatch):
    """The same logits as by row-major ones; where sums must not change their order, or a compiler fuses, they stay row-major."""
    if (why := onednn.why_not_reordered(torch.float32)) is not None:
        pytest.skip(why)
    monkeypatch.setattr(weight_form, "native_kernels", lambda: NotNative("off: a test wants it so"))
    path = random_model(str(tmp_path), "tiny")

    def logits(why: str | None) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        sample = model_runner.sample
        with monkeypatch.context() as patch:
            patch.setattr(weight_form, "why_not_reordered", lambda dtype: why)
            patch.setattr(
                model_runner, "sample", lambda logits, *rest, **kw: (seen.append(logits.clone()), sample(logits, *rest))[1]
            )
            with Driver(path, dry=True, dtype="float32", quantization=quantization) as driver:
                driver.generate([40, 7], 2)
                linears = [module for module in driver.runner._model.modules() if isinstance(module, Linear)]
                assert all((linear.reordered is None) == bool(why) for linear in linears) and linears
                words = "row-major (a test wants it so)" if why else "in oneDNN's order"
                assert driver.runner.info.explain["weights"].removeprefix(f"the values of quantization {quantization}, ") == (
                    f"{words}, multiplied by torch"
                )
                assert driver.runner.info.memory.weights >= sum(p.nbytes for p in driver.runner._model.parameters())
        return torch.cat(seen)

    torch.testing.assert_close(logits(None), logits("a test wants it so"), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("option", ["enable_deterministic_inference", "enable_torch_compile"])
def test_what_keeps_weights_row_major(option, monkeypatch):
    monkeypatch.setattr(weight_form, "native_kernels", lambda: NotNative("off: a test wants it so"))
    config = RunnerConfig(model_path="m", dtype="float32", **{option: True})
    found = weight_form.plan_weights(config, "float32", torch.device("cpu"))
    assert not found.reorder and found.explain["weights"].startswith("row-major (")
