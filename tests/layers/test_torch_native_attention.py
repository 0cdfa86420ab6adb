from __future__ import annotations

import numpy as np
import pytest
import torch

from banyan.layers.attention import torch_native
from banyan.layers.attention.attention import Attention
from banyan.layers.attention.base import AttentionSpec
from banyan.layers.attention.registry import attention_backend
from banyan.layers.forward_batch import ForwardBatch
from banyan.mem_cache.kv_pool import KVPool

H, K, D = 6, 2, 8


def make_batch(seq_lens: list[int], extend_lens: list[int], rng: np.random.Generator, num_slots: int) -> ForwardBatch:
    seq, ext = np.array(seq_lens), np.array(extend_lens)
    rows = rng.permutation(len(seq)) + 1
    table = np.zeros((len(seq) + 1, max(seq_lens) + 3), np.int32)
    slots = rng.permutation(num_slots)[: seq.sum()] + 1
    for row, part in zip(rows, np.split(slots, np.cumsum(seq)[:-1]), strict=True):
        table[row, : len(part)] = part
    locs = np.concatenate([table[r, s - e : s] for r, s, e in zip(rows, seq, ext, strict=True)])
    t = torch.from_numpy
    total = int(ext.sum())
    return ForwardBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.zeros(total, dtype=torch.int64),
        rows=t(rows),
        seq_lens=t(seq),
        extend_lens=t(ext),
        prefix_lens=t(seq - ext),
        out_cache_loc=t(locs.astype(np.int64)),
        req_to_token=t(table),
        sample_tokens=t(np.cumsum(ext) - 1),
        seq_lens_host=seq,
        extend_lens_host=ext,
        prefix_lens_host=seq - ext,
    )


def naive(q, k_all, v_all, first_position: int, layer: AttentionSpec) -> np.ndarray:
    """One request, float64, one query and head at a time."""
    out = np.zeros((len(q), layer.num_heads, layer.head_dim))
    for i in range(len(q)):
        position = first_position + i
        low = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
        for h in range(layer.num_heads):
            kv = h // (layer.num_heads // layer.num_kv_heads)
            scores = k_all[low : position + 1, kv] @ q[i, h] * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights / weights.sum() @ v_all[low : position + 1, kv]
    return out


BATCHES = {
    "one decode": ([17], [1]),
    "first token": ([1], [1]),
    "decodes": ([9, 1, 30, 12], [1, 1, 1, 1]),
    "prompts": ([11, 3, 25], [11, 3, 25]),
    "chunks behind prefixes": ([20, 13, 31], [7, 12, 2]),
    "mixed": ([20, 8, 13, 1, 26], [1, 8, 5, 1, 1]),
}


@pytest.mark.parametrize("small_blocks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
def test_equals_the_naive_reference(lens, window, soft_cap, small_blocks, monkeypatch):
    if small_blocks:
        monkeypatch.setattr(torch_native, "QUERY_BLOCK", 4)
        monkeypatch.setattr(torch_native, "PADDED_MAX_LEN", 10)
    rng = np.random.default_rng(0)
    batch = make_batch(*lens, rng, num_slots=128)
    pool = KVPool(
        num_slots=128, page_size=1, num_layers=2, num_kv_heads=K, head_dim=D, dtype=torch.float32, device=torch.device("cpu")
    )
    for layer_id in range(2):
        everywhere = torch.arange(1, 129)
        noise = torch.from_numpy(rng.standard_normal((2, 128, K, D)).astype(np.float32))
        pool.write(layer_id, everywhere, noise[0], noise[1])
    layer = AttentionSpec(layer_id=1, num_heads=H, num_kv_heads=K, head_dim=D, scale=0.3, sliding_window=window, soft_cap=soft_cap)
    total = int(batch.extend_lens_host.sum())
    qkv = torch.from_numpy(rng.standard_normal((total, H + 2 * K, D)).astype(np.float32) * 2)
    before = qkv.clone()
    backend = attention_backend("torch_native")(pool)
    backend.plan(batch)
    attention = Attention(layer)
    attention.bind(backend)
    got = attention(qkv[:, :H], qkv[:, H : H + K], qkv[:, H + K :], batch).view(total, H, D)

    assert torch.equal(qkv, before), "the arguments are left as they were"
    assert torch.equal(pool.k(1)[batch.out_cache_loc], qkv[:, H : H + K])
    assert torch.equal(pool.v(1)[batch.out_cache_loc], qkv[:, H + K :])
    start = 0
    for b, (seq, ext) in enumerate(zip(*lens, strict=True)):
        slots = batch.req_to_token[batch.rows[b], :seq].long()
        k_all, v_all = pool.k(1)[slots].double().numpy(), pool.v(1)[slots].double().numpy()
        expected = naive(qkv[start : start + ext, :H].double().numpy(), k_all, v_all, seq - ext, layer)
        np.testing.assert_allclose(got[start : start + ext].numpy(), expected, atol=2e-5)
        start += ext


def test_long_requests_grow_the_mask():
    rng = np.random.default_rng(1)
    pool = KVPool(
        num_slots=1024, page_size=1, num_layers=1, num_kv_heads=K, head_dim=D, dtype=torch.float32, device=torch.device("cpu")
    )
    backend = attention_backend("torch_native")(pool)
    layer = AttentionSpec(layer_id=0, num_heads=H, num_kv_heads=K, head_dim=D, scale=0.3)
    for length in (40, 700):
        batch = make_batch([length], [length], rng, num_slots=1024)
        qkv = torch.from_numpy(rng.standard_normal((length, H + 2 * K, D)).astype(np.float32))
        backend.plan(batch)
        got = backend.forward(qkv[:, :H], qkv[:, H : H + K], qkv[:, H + K :], layer, batch)
        full = qkv.double().numpy()
        for i in (0, length // 2, length - 1):
            expected = naive(full[i : i + 1, :H], full[:, H : H + K], full[:, H + K :], i, layer)
            np.testing.assert_allclose(got[i : i + 1].numpy(), expected, atol=2e-5)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'flashy'; known are torch_native, torch_invariant, cpu, triton, flashinfer, fa3"):
        attention_backend("flashy")


def test_attention_without_a_backend_says_so():
    layer = Attention(AttentionSpec(layer_id=0, num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0))
    with pytest.raises(RuntimeError, match="backend"):
        layer(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), None)
