"""Prompts recorded in pieces, over whole models on the CPU: a recorder that replays operations stands for CUDA's."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from attention_batches import make_batch, pools
from gpu_driver import Driver, random_model
from graph_recorder import OpRecorder

from banyan.layers.attention.attention import bind_attention
from banyan.layers.attention.torch_native import TorchNativeBackend
from banyan.layers.kernels.cpu.library import NotNative
from banyan.layers.kernels.ops import TORCH
from banyan.layers.scaled_linear import DeviceFormat
from banyan.model_executor import model_runner, step_graphs, weight_form
from banyan.model_executor.cuda_graph import DecodeGraphs
from banyan.model_executor.forward import AttentionPlan
from banyan.model_executor.model_config import load_model_config
from banyan.model_executor.models.registry import model_class
from banyan.model_executor.prefill_graph import PrefillGraphs, prefill_sizes
from banyan.model_executor.weights import dummy_weights

SLOTS = 256
PLAN = AttentionPlan("torch_native", torch.float32, {"attention_backend": "torch_native (a test)"})


class Recordable(TorchNativeBackend):
    def plan_capture(self, batch):
        self.plan(batch)

    def plan_replay(self, batch):
        self.plan(batch)


class Again:
    """Runs the call again: a plan on the host is new at each replay."""

    def record(self, call):
        output = call().clone()
        return lambda: output.copy_(call()), output


@pytest.fixture
def made(tmp_path):
    """(model, a plain backend, a backend over a pool of its own)."""

    def make(quantization: str | None = None, **overrides):
        config = load_model_config(random_model(str(tmp_path), "tiny"), overrides=overrides)
        model = model_class(config.architecture)(config, torch.float32)
        form = None if quantization is None else DeviceFormat(quantization, TORCH)
        dummy_weights(model, 1, lambda module: module.pack(form) if form and hasattr(module, "sizes") else None)
        for parameter in model.parameters():
            parameter.mul_(10)  # so that a token differs from another
        ours, theirs = pools(SLOTS, 4, config.num_key_value_heads, config.head_dim, torch.float32)
        return model.eval(), TorchNativeBackend(theirs), Recordable(ours), (ours, theirs)

    return make


def batch_of(lens: list[int], extends: list[int], seed: int):
    batch, _ = make_batch(lens, extends, page=4, rng=np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    batch.input_ids = torch.from_numpy(rng.integers(0, 128, int(batch.extend_lens_host.sum())))
    spans = [np.arange(length - extend, length) for length, extend in zip(lens, extends, strict=True)]
    batch.positions = torch.from_numpy(np.concatenate(spans))
    return batch


def graphs_of(model, backend, recorder, sizes=(8, 16, 40)):
    bind_attention(model, backend)
    device = torch.device("cpu")
    return PrefillGraphs(model, model.hidden_states, backend, sizes=sizes, recorder=recorder, dtype=torch.float32, device=device)


STEPS = [([37], [37]), ([9, 20, 3], [9, 5, 1]), ([16], [16]), ([40, 7], [1, 1]), ([8], [8]), ([40], [40]), ([5], [3])]


@pytest.mark.parametrize("quantization", [None, "int8"])
@torch.inference_mode()
def test_replayed_pieces_equal_eager_steps(quantization, made):
    model, plain, backend, (ours, theirs) = made(quantization)
    recorder = OpRecorder()
    graphs = graphs_of(model, backend, recorder)
    assert recorder.recorded == 3 * 3 and recorder.replays == 0, "two layers are three pieces"
    for seed, (lens, extends) in enumerate(STEPS):
        batch = batch_of(lens, extends, seed)
        bind_attention(model, plain)
        plain.plan(batch)
        expected = model.hidden_states(batch)
        bind_attention(model, backend)
        got = graphs.run(batch)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
        for mine, other in ((ours.k(0), theirs.k(0)), (ours.v(1), theirs.v(1))):  # padding writes nowhere
            torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)
    assert recorder.replays == 3 * len(STEPS)


@torch.inference_mode()
def test_a_step_that_is_too_long_is_not_recorded_and_the_backend_stays_bound(made):
    model, _, backend, _ = made()
    graphs = graphs_of(model, backend, OpRecorder(), sizes=(8,))
    batch = batch_of([9], [9], 0)
    assert graphs.run(batch) is None
    backend.plan(batch)
    assert model.hidden_states(batch).shape == (9, 32)


@torch.inference_mode()
def test_layers_of_other_kinds_and_decode_graphs_beside_them(made):
    model, plain, backend, _ = made(sliding_window=6, use_sliding_window=True, attn_logit_softcapping=2.0)
    prefill = graphs_of(model, backend, OpRecorder())
    batch = batch_of([30, 9], [1, 1], 3)
    decode = DecodeGraphs(model.hidden_states, backend, batch.req_to_token, sizes=[1, 4], recorder=Again())
    bind_attention(model, plain)
    plain.plan(batch)
    expected = model.hidden_states(batch)
    bind_attention(model, backend)
    for graphs in (prefill, decode, prefill, decode):
        torch.testing.assert_close(graphs.run(batch), expected, atol=2e-5, rtol=2e-5)


def test_sizes():
    assert prefill_sizes(3) == [3] and prefill_sizes(10) == [4, 8, 10]
    sizes = prefill_sizes(2048)
    assert sizes[:9] == [4, 8, 12, 16, 20, 24, 28, 32, 48] and sizes[-4:] == [1280, 1536, 1792, 2048] and len(sizes) == 42
    assert prefill_sizes(5000)[-3:] == [4096, 4608, 5000]
    assert prefill_sizes(4096)[-1] == 4096


def test_a_runner_replays_and_says_so(tmp_path, monkeypatch):
    """The whole runner with recordings, over a recorder that replays operations: the same ids as without."""
    monkeypatch.setattr(weight_form, "native_kernels", lambda: NotNative("off: a test wants it so"))
    path = random_model(str(tmp_path), "tiny")
    found = []
    for sizes in ((), (16, 32)):
        monkeypatch.setattr(model_runner, "plan_attention", lambda *_, sizes=sizes, **kw: PLAN._replace(prefill_graph_sizes=sizes))
        monkeypatch.setattr(model_runner, "record_steps", partial(step_graphs.record_steps, recorder=OpRecorder()))
        with Driver(path, dry=True, dtype="float32", page_size=4) as driver:
            flags, launch = [], driver.runner.launch

            def watched(step, launch=launch, flags=flags):
                handle = launch(step)
                flags.append((len(step.input_ids), handle.wait().graph))
                return handle

            monkeypatch.setattr(driver.runner, "launch", watched)
            found.append((driver.generate([20, 33, 5], 3), flags))
    (plain, eager), (replayed, flags) = found
    assert plain == replayed and not any(graph for _, graph in eager)
    assert flags == [(tokens, tokens <= 32) for tokens, _ in flags] and {20, 33, 3} <= {tokens for tokens, _ in flags}
