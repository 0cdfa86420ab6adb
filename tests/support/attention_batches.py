"""Batches and pools for tests of attention backends."""

from __future__ import annotations

import numpy as np
import torch

from banyan.layers.forward_batch import ForwardBatch
from banyan.mem_cache.kv_pool import KVPool

CPU = torch.device("cpu")


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


def pools(
    num_slots: int, page: int, heads: int, dim: int, dtype: torch.dtype, compute: torch.dtype | None = None
) -> tuple[KVPool, KVPool]:
    """Two equal pools of random KV."""
    made = []
    for _ in range(2):
        shape = {"num_slots": num_slots, "page_size": page, "num_layers": 2, "num_kv_heads": heads, "head_dim": dim}
        pool = KVPool(**shape, dtype=dtype, device=CPU, compute_dtype=compute)
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
