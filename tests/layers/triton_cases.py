"""Triton kernels under the interpreter against torch. Not collected by itself: test_triton.py runs it in a process of its own, as
TRITON_INTERPRET must be set before a kernel's module is imported. bf16 is not tested here: the interpreter holds it as raw bits."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest
import torch

from banyan.layers.attention.base import AttentionSpec
from banyan.layers.attention.torch_native import TorchNativeBackend
from banyan.layers.attention.triton import TritonBackend
from banyan.layers.forward_batch import ForwardBatch
from banyan.mem_cache.kv_pool import KVPool

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("run with TRITON_INTERPRET=1")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def make_batch(seq_lens: list[int], extend_lens: list[int], *, page: int, rng: np.random.Generator) -> tuple[ForwardBatch, int]:
    """A batch whose requests own shuffled pages, and the number of slots."""
    seq, ext = np.array(seq_lens, np.int64), np.array(extend_lens, np.int64)
    pages = -(-seq // page)
    order = rng.permutation(int(pages.sum())) + 1
    rows = rng.permutation(len(seq)) + 1
    table = np.zeros((len(seq) + 1, int(seq.max()) + 3), np.int32)
    for row, length, own in zip(rows, seq, np.split(order, np.cumsum(pages)[:-1]), strict=True):
        table[row, :length] = (own[:, None] * page + np.arange(page)).reshape(-1)[:length]
    locs = np.concatenate([table[r, s - e : s] for r, s, e in zip(rows, seq, ext, strict=True)]).astype(np.int64)
    t, total = torch.from_numpy, int(ext.sum())
    zeros = torch.zeros(total, dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=zeros,
        positions=zeros,
        rows=t(rows),
        seq_lens=t(seq),
        extend_lens=t(ext),
        prefix_lens=t(seq - ext),
        out_cache_loc=t(locs),
        req_to_token=t(table),
        sample_tokens=t(np.cumsum(ext) - 1),
        seq_lens_host=seq,
        extend_lens_host=ext,
        prefix_lens_host=seq - ext,
    )
    return batch, int(pages.sum()) * page


def pools(num_slots: int, page: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[KVPool, KVPool]:
    """Two equal pools of random KV."""
    made = []
    for _ in range(2):
        shape = {"num_slots": num_slots, "page_size": page, "num_layers": 2, "num_kv_heads": heads, "head_dim": dim}
        pool = KVPool(**shape, dtype=dtype, device=CPU)
        generator = torch.Generator().manual_seed(3)
        for layer in range(2):
            pool.k(layer).copy_(torch.randn(pool.k(layer).shape, generator=generator))
            pool.v(layer).copy_(torch.randn(pool.v(layer).shape, generator=generator))
        made.append(pool)
    return made[0], made[1]


BATCHES = {
    "decode": ([37, 1, 90], [1, 1, 1]),
    "long decode": ([290, 20], [1, 1]),
    "prompts": ([21, 3, 70], [21, 3, 70]),
    "chunks": ([40, 75], [7, 33]),
    "mixed": ([60, 33, 9], [1, 20, 9]),
    "few tokens each": ([300, 17], [4, 3]),
}


@dataclasses.dataclass
class Case:
    batch: str
    group: int
    dim: int
    page: int = 1
    window: int | None = None
    cap: float | None = None
    dtype: torch.dtype = torch.float32


def check(case: Case, capture: bool = False) -> None:
    rng = np.random.default_rng(0)
    batch, num_slots = make_batch(*BATCHES[case.batch], page=case.page, rng=rng)
    kv_heads = 2
    heads = kv_heads * case.group
    spec = AttentionSpec(
        layer_id=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=case.dim,
        scale=case.dim**-0.5,
        sliding_window=case.window,
        soft_cap=case.cap,
    )
    ours, theirs = pools(num_slots, case.page, kv_heads, case.dim, case.dtype)
    qkv = torch.from_numpy(rng.standard_normal((int(batch.extend_lens_host.sum()), heads + 2 * kv_heads, case.dim))).to(case.dtype)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    reference = TorchNativeBackend(theirs)
    reference.plan(batch)
    expected = reference.forward(q, k, v, spec, batch)
    backend = TritonBackend(ours)
    if capture:
        backend.plan_capture(batch)
        backend.plan_replay(batch)
    else:
        backend.plan(batch)
    got = backend.forward(q, k, v, spec, batch)
    assert torch.equal(ours.k(1), theirs.k(1)) and torch.equal(ours.v(1), theirs.v(1))
    torch.testing.assert_close(got, expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


SAMPLE = [
    Case("decode", 3, 64),
    Case("long decode", 4, 80, page=16, window=270),
    Case("mixed", 3, 64, page=16, cap=2.0),
    Case("few tokens each", 2, 128, window=19, dtype=torch.float16),
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_attention(case):
    check(case)


def test_a_recorded_plan_gives_the_same():
    check(Case("long decode", 3, 64), capture=True)


GRID = [
    Case(batch, group, dim, page=page, window=window, cap=cap, dtype=dtype)
    for (batch, (group, dim)), (page, window, cap), dtype in itertools.product(
        itertools.product(BATCHES, [(1, 64), (3, 80), (8, 128), (2, 256)]),
        [(1, None, None), (16, 12, None), (1, 1, 1.5), (16, None, 3.0)],
        [torch.float32, torch.float16],
    )
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", GRID, ids=str)
def test_attention_grid(case):
    check(case)
