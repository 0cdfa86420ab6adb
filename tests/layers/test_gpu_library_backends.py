"""The FlashInfer and FA3 backends over stand-ins that bind each call to the real signatures and compute in torch."""

from __future__ import annotations

import os
from pathlib import Path

import gpu_signatures
import gpu_stand_ins
import numpy as np
import pytest
import torch
from attention_batches import BATCHES, make_batch, pools

from banyan.layers.attention import flashinfer
from banyan.layers.attention.base import AttentionSpec, RecordableBackend
from banyan.layers.attention.phases import PhaseBackend, is_recordable
from banyan.layers.attention.registry import attention_backend
from banyan.layers.attention.torch_native import TorchNativeBackend

KV_HEADS, GROUP, DIM = 2, 3, 64


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(flashinfer, "MERGE_MIN_PREFIX", 50)
    gpu_stand_ins.install(monkeypatch)


def specs(window: int | None, cap: float | None) -> list[AttentionSpec]:
    """Two layers of different kinds."""
    shape = {"num_heads": KV_HEADS * GROUP, "num_kv_heads": KV_HEADS, "head_dim": DIM, "scale": 0.2}
    return [AttentionSpec(layer_id=0, **shape), AttentionSpec(layer_id=1, **shape, sliding_window=window, soft_cap=cap)]


def run(backend, batch, layers, qkv):
    heads = KV_HEADS * GROUP
    return [backend.forward(qkv[:, :heads], qkv[:, heads : heads + KV_HEADS], qkv[:, heads + KV_HEADS :], s, batch) for s in layers]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (12, 2.0), (1, None)])
@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
@pytest.mark.parametrize("lens", BATCHES)
def test_a_library_backend_equals_torch(lens, name, window, cap, page):
    rng = np.random.default_rng(0)
    batch, num_slots = make_batch(*BATCHES[lens], page=page, rng=rng)
    ours, theirs = pools(num_slots, page, KV_HEADS, DIM, torch.float32)
    layers = specs(window, cap)
    qkv = torch.from_numpy(rng.standard_normal((int(batch.extend_lens_host.sum()), KV_HEADS * (GROUP + 2), DIM))).float()
    reference, backend = TorchNativeBackend(theirs), attention_backend(name)(ours)
    for each in (reference, backend):
        each.plan(batch)
    expected, got = run(reference, batch, layers, qkv), run(backend, batch, layers, qkv)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    if lens == "decode":  # the same as a recording would run it
        assert isinstance(backend, RecordableBackend)
        backend.plan_capture(batch)
        torch.testing.assert_close(run(backend, batch, layers, qkv), expected, atol=2e-5, rtol=2e-5)
        backend.plan_replay(batch)
        torch.testing.assert_close(run(backend, batch, layers, qkv), expected, atol=2e-5, rtol=2e-5)


def test_every_path_of_flashinfer_is_taken(monkeypatch):
    """What makes the tests above able to fail for each of them."""
    taken = set()
    original = flashinfer.FlashInferBackend._make_plan
    monkeypatch.setattr(flashinfer.FlashInferBackend, "_make_plan", lambda *args: taken.add(original(*args)) or original(*args))
    for lens in BATCHES:
        test_a_library_backend_equals_torch(lens, "flashinfer", 12, None, 16)
    assert taken == {"decode", "paged", "ragged", "merged"}


def test_phases_go_to_their_backends():
    class Spy(TorchNativeBackend):
        steps = 0

        def plan(self, batch):
            super().plan(batch)
            self.steps += 1

    rng = np.random.default_rng(0)
    pool, _ = pools(256, 1, KV_HEADS, DIM, torch.float32)
    prefill, decode = Spy(pool), Spy(pool)
    backend = PhaseBackend(prefill, decode)
    for lens, expected in (("decode", (0, 1)), ("mixed", (1, 1)), ("prompts", (2, 1))):
        batch, _ = make_batch(*BATCHES[lens], page=1, rng=rng)
        backend.plan(batch)
        assert (prefill.steps, decode.steps) == expected
    assert not is_recordable(backend)
    with pytest.raises(TypeError, match="Spy cannot be recorded"):
        backend.plan_capture(batch)


def test_every_recorded_call_is_named_and_readable():
    assert gpu_signatures.recorded().keys() == gpu_signatures.CALLS.keys()
    with pytest.raises(TypeError, match="no_such"):
        gpu_stand_ins.bound("flashinfer.merge_state", 1, 2, 3, 4, no_such=1)


@pytest.mark.nightly
def test_recorded_signatures_are_those_of_the_wheels():
    """BANYAN_GPU_WHEELS names a folder with the unpacked flashinfer and sgl_kernel of the versions that the extra cuda pins."""
    folder = os.environ.get("BANYAN_GPU_WHEELS")
    if not folder:
        pytest.skip("BANYAN_GPU_WHEELS is not set")
    read = {call: [tuple(p) for p in parameters] for call, parameters in gpu_signatures.read(Path(folder)).items()}
    recorded = {
        call: [(p.name, p.kind.value, p.default is not p.empty) for p in signature.parameters.values()]
        for call, signature in gpu_signatures.recorded().items()
    }
    assert read == recorded
