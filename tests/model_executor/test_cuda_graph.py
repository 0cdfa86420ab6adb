"""Recorded decode on the CPU: a recorder that runs the call again stands for CUDA's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_batches import make_batch, pools

from banyan.layers.attention.base import AttentionSpec
from banyan.layers.attention.torch_native import TorchNativeBackend
from banyan.model_executor.cuda_graph import DecodeGraphs, capture_sizes, parse_sizes

K, D = 2, 8
SPEC = AttentionSpec(layer_id=1, num_heads=4, num_kv_heads=K, head_dim=D, scale=0.4)


class Recordable(TorchNativeBackend):
    captures = replays = 0

    def plan_capture(self, batch):
        self.captures += 1
        self.plan(batch)

    def plan_replay(self, batch):
        self.replays += 1
        self.plan(batch)


class Again:
    """record() runs the call; a replay runs it again into the same tensor, as a graph does."""

    def record(self, call):
        output = call().clone()
        return lambda: output.copy_(call()), output


def forward_of(backend):
    """A 'model' of one attention layer whose q, k and v follow from id and position."""

    def forward(batch):
        base = (batch.input_ids[:, None, None] * 0.37 + batch.positions[:, None, None] * 0.11).expand(-1, 8, D)
        qkv = torch.sin(base + torch.arange(8 * D).view(8, D))
        return backend.forward(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], SPEC, batch).flatten(1)

    return forward


@pytest.mark.parametrize("lens", [[37], [9, 20, 3], [5, 6, 7, 8], [30, 1, 2, 9, 12]])
def test_a_padded_replay_equals_an_eager_step_and_touches_nobody_elses_slots(lens):
    batch, num_slots = make_batch(lens, [1] * len(lens), page=4, rng=np.random.default_rng(0))
    batch.input_ids = torch.arange(len(lens)) + 3
    batch.positions = batch.seq_lens - 1
    ours, theirs = pools(num_slots, 4, K, D, torch.float32)
    plain, recorded = TorchNativeBackend(theirs), Recordable(ours)
    graphs = DecodeGraphs(forward_of(recorded), recorded, batch.req_to_token, sizes=[1, 4, 8], recorder=Again())
    assert (recorded.captures, recorded.replays) == (3, 0)
    plain.plan(batch)
    expected = forward_of(plain)(batch)
    for _ in range(2):  # a second step finds the tensors of the first
        got = graphs.run(batch)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert recorded.replays == 2
    assert torch.equal(ours.k(1)[1:], theirs.k(1)[1:]), "only slot 0 is scratch"


def test_a_smaller_batch_after_a_larger_one_leaves_its_rows_behind():
    batch, num_slots = make_batch([9, 20, 3], [1, 1, 1], page=1, rng=np.random.default_rng(1))
    batch.positions = batch.seq_lens - 1
    pool, _ = pools(num_slots, 1, K, D, torch.float32)
    backend = Recordable(pool)
    graphs = DecodeGraphs(forward_of(backend), backend, batch.req_to_token, sizes=[4], recorder=Again())
    graphs.run(batch)
    before = pool.k(1).clone()
    one, _ = make_batch([6], [1], page=1, rng=np.random.default_rng(2))
    one.out_cache_loc = torch.tensor([2])
    one.positions = one.seq_lens - 1
    graphs.run(one)
    changed = (pool.k(1) != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert set(changed) <= {0, 2}


def test_prompts_and_what_is_too_large_are_not_recorded():
    batch, num_slots = make_batch([9, 20, 3], [1, 1, 1], page=1, rng=np.random.default_rng(1))
    backend = Recordable(pools(num_slots, 1, K, D, torch.float32)[0])
    graphs = DecodeGraphs(forward_of(backend), backend, batch.req_to_token, sizes=[2], recorder=Again())
    assert graphs.run(batch) is None
    prompt, _ = make_batch([5], [5], page=1, rng=np.random.default_rng(1))
    assert graphs.run(prompt) is None


def test_capture_sizes():
    assert capture_sizes(1) == [1] and capture_sizes(10) == [1, 2, 4, 8, 10]
    sizes = capture_sizes(600)
    assert sizes[:7] == [1, 2, 4, 8, 12, 16, 24] and sizes[-1] == 600 and {256, 272, 496, 512, 544, 576} <= set(sizes)
    assert len(capture_sizes(256)) == 36


@pytest.mark.parametrize("text", ["", "1,", "a", "1,0", "-1"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="cuda_graph_bs"):
        parse_sizes(text)


def test_sizes_are_sorted():
    assert parse_sizes("8, 1,4,8") == [1, 4, 8]
