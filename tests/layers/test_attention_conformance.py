"""Every attention backend against one reference: float64, one query and head at a time, over what the pool holds.

A backend joins by a line in BACKENDS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from banyan.layers.attention.attention import Attention
from banyan.layers.attention.base import AttentionBackend, AttentionSpec
from banyan.layers.attention.cpu import CpuBackend
from banyan.layers.attention.torch_native import TorchNativeBackend
from banyan.layers.forward_batch import ForwardBatch
from banyan.layers.kernels.cpu.attention import SHARED_MIN, prefix_groups
from banyan.layers.kernels.cpu.build import LEVELS, supported_levels
from banyan.layers.kernels.cpu.library import load
from banyan.mem_cache.kv_pool import KVPool

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Backend:
    """How to make one, and the KV dtypes that it reads."""

    make: Callable[[KVPool], AttentionBackend]
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.int8)


def native(level: str) -> Callable[[KVPool], AttentionBackend]:
    return lambda pool: CpuBackend(pool, load(level))


BACKENDS = {"torch_native": Backend(TorchNativeBackend)} | {f"cpu-{level}": Backend(native(level)) for level in supported_levels()}
# The best level is tested always, the others, which must be built for it, at night.
NAMES = [
    pytest.param(name, marks=[pytest.mark.nightly] if name.startswith("cpu") and name != f"cpu-{supported_levels()[-1]}" else [])
    for name in BACKENDS
]
NATIVE = [param for param in NAMES if param.values[0].startswith("cpu")]


@dataclass(frozen=True)
class Case:
    """Requests of seq_lens tokens, of which extend_lens are computed."""

    seq_lens: tuple[int, ...]
    extend_lens: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    window: int | None = None
    soft_cap: float | None = None
    page: int = 1
    kv: torch.dtype = torch.float32
    shared: int = 0  # leading slots that all requests have in common

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(1, self.heads, self.kv_heads, self.dim, self.dim**-0.5, self.window, self.soft_cap)


RAGGED = {
    "decode": ((17, 1, 64, 65, 200), (1, 1, 1, 1, 1)),
    "prompts": ((11, 1, 130), (11, 1, 130)),
    "chunks": ((20, 65, 131, 300), (7, 64, 2, 5)),
    "behind one token": ((12, 40), (11, 39)),
    "mixed": ((90, 8, 13, 1, 260), (1, 8, 5, 1, 100)),
    "one long": ((1500,), (1,)),
}
CASES = {
    **{f"{name}": Case(*lens) for name, lens in RAGGED.items()},
    **{f"{name}, window": Case(*lens, window=33) for name, lens in RAGGED.items()},
    **{f"group {group}": Case((70, 129), (1, 30), heads=2 * group) for group in (1, 3, 4, 5, 7, 8, 16)},
    **{f"head dim {dim}": Case((70, 129), (1, 30), dim=dim) for dim in (8, 12, 80, 96, 128, 256)},
    **{f"KV {dtype}"[9:]: Case((70, 12, 129, 64), (1, 12, 30, 1), kv=dtype) for dtype in (torch.bfloat16, torch.int8)},
    **{f"forty requests, {dtype}": Case(tuple(range(1, 400, 10)), (1,) * 40, kv=dtype) for dtype in Backend.kv_dtypes},
    **{f"KV {dtype} dim 12"[9:]: Case((70, 129), (1, 30), kv=dtype, dim=12) for dtype in (torch.bfloat16, torch.int8)},
    **{f"pages of {page}": Case((70, 12, 129), (1, 12, 30), page=page) for page in (4, 16, 64)},
    "window 1": Case((70, 129), (1, 30), window=1),
    "window beyond": Case((70, 129), (1, 30), window=1000),
    "soft cap": Case((70, 129), (1, 30), soft_cap=1.5),
    "soft cap and window": Case((70, 129), (1, 30), soft_cap=20.0, window=40),
    "shared prefix": Case((200, 131, 160, 330, 192), (1, 1, 1, 1, 1), shared=130),
    "shared prefix, window": Case((200, 131, 160), (1, 1, 1), shared=130, window=100),
    "shared prefix of chunks": Case((200, 140, 170, 190), (1, 9, 30, 1), shared=130),
}


def make_batch(case: Case, rng: np.random.Generator) -> tuple[ForwardBatch, int]:
    """A batch whose requests own shuffled pages, behind those that they share; and the number of slots."""
    seq, ext, page = np.array(case.seq_lens), np.array(case.extend_lens), case.page
    num_pages = -(-seq // page)
    pages = rng.permutation(int(num_pages.sum())) + 1
    rows = rng.permutation(len(seq)) + 1
    table = np.zeros((len(seq) + 1, int(seq.max()) + 3), np.int32)
    for row, length, own in zip(rows, seq, np.split(pages, np.cumsum(num_pages)[:-1]), strict=True):
        table[row, :length] = (own[:, None] * page + np.arange(page)).reshape(-1)[:length]
        table[row, : case.shared] = table[rows[0], : case.shared]
    locs = np.concatenate([table[r, s - e : s] for r, s, e in zip(rows, seq, ext, strict=True)]).astype(np.int64)
    t, total = torch.from_numpy, int(ext.sum())
    batch = ForwardBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.zeros(total, dtype=torch.int64),
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
    return batch, int(num_pages.sum()) * page


def make_pool(case: Case, num_slots: int, rng: np.random.Generator) -> KVPool:
    """Two layers, full of noise."""
    pool = KVPool(
        num_slots=num_slots,
        page_size=case.page,
        num_layers=2,
        num_kv_heads=case.kv_heads,
        head_dim=case.dim,
        dtype=case.kv,
        device=CPU,
        compute_dtype=torch.float32,
    )
    everywhere = torch.arange(case.page, num_slots + case.page)
    for layer in range(2):
        noise = torch.from_numpy(rng.standard_normal((2, num_slots, case.kv_heads, case.dim)).astype(np.float32))
        pool.write(layer, everywhere, noise[0], noise[1])
    return pool


def make_qkv(case: Case, rng: np.random.Generator) -> torch.Tensor:
    shape = (sum(case.extend_lens), case.heads + 2 * case.kv_heads, case.dim)
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 2)


def run(backend: AttentionBackend, case: Case, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    attention = Attention(case.spec)
    attention.bind(backend)
    backend.plan(batch)
    q, k, v = qkv.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    return attention(q, k, v, batch).view(q.shape)


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, first_position: int, layer: AttentionSpec) -> np.ndarray:
    """One request: q [Q, H, D] from first_position on, k and v [L, K, D]."""
    out = np.zeros(q.shape)
    for i in range(len(q)):
        position = first_position + i
        low = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
        for h in range(layer.num_heads):
            kv = h // (layer.num_heads // layer.num_kv_heads)
            scores = k[low : position + 1, kv] @ q[i, h] * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights / weights.sum() @ v[low : position + 1, kv]
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(name: str, case: Case) -> None:
    rng = np.random.default_rng(0)
    batch, num_slots = make_batch(case, rng)
    pool = make_pool(case, num_slots, rng)
    if case.kv not in BACKENDS[name].kv_dtypes:
        pytest.skip(f"{name} does not read {case.kv}")
    qkv = make_qkv(case, rng)
    before = qkv.clone()
    got = run(BACKENDS[name].make(pool), case, qkv, batch)

    assert torch.equal(qkv, before), "the arguments are left as they were"
    k_new, v_new = pool.gather(1, batch.out_cache_loc)
    tolerance = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.int8: 0.005}[case.kv]
    for new, x in ((k_new, qkv[:, case.heads : case.heads + case.kv_heads]), (v_new, qkv[:, case.heads + case.kv_heads :])):
        assert ((new - x).abs() <= tolerance * x.abs().amax(-1, keepdim=True)).all()
    start = 0
    for b, (seq, ext) in enumerate(zip(case.seq_lens, case.extend_lens, strict=True)):
        k, v = (x.double().numpy() for x in pool.gather(1, batch.req_to_token[batch.rows[b], :seq].long()))
        expected = reference(qkv[start : start + ext, : case.heads].double().numpy(), k, v, seq - ext, case.spec)
        np.testing.assert_allclose(got[start : start + ext].numpy(), expected, atol=3e-5, rtol=3e-5)
        start += ext


def fill(case: Case, name: str, qkv: torch.Tensor, ends: list[int], table: torch.Tensor, pool: KVPool) -> torch.Tensor:
    """Compute one request in chunks that end at ``ends``; what every token attends to."""
    backend, parts = BACKENDS[name].make(pool), []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        one = np.array([end]), np.array([end - begin])
        batch = ForwardBatch(
            input_ids=torch.zeros(end - begin, dtype=torch.int64),
            positions=torch.arange(begin, end),
            rows=torch.tensor([1]),
            seq_lens=torch.tensor([end]),
            extend_lens=torch.tensor([end - begin]),
            prefix_lens=torch.tensor([begin]),
            out_cache_loc=table[1, begin:end].long(),
            req_to_token=table,
            sample_tokens=torch.tensor([end - begin - 1]),
            seq_lens_host=one[0],
            extend_lens_host=one[1],
            prefix_lens_host=one[0] - one[1],
        )
        parts.append(run(backend, case, qkv[begin:end], batch))
    return torch.cat(parts)


@pytest.mark.parametrize("case", [Case((210,), (210,)), Case((210,), (210,), heads=10, dim=80, window=70, kv=torch.int8)])
@pytest.mark.parametrize("name", NATIVE)
def test_any_chunking_gives_the_same_bits(name: str, case: Case) -> None:
    qkv, whole = make_qkv(case, np.random.default_rng(4)), None
    for seed, ends in enumerate(([210], [1, 64, 65, 130, 210], [7, 100, 209, 210], [*range(1, 211)])):
        rng = np.random.default_rng(seed)
        table = np.zeros((2, 220), np.int32)
        table[1, :210] = rng.permutation(300)[:210] + 1
        got = fill(case, name, qkv, ends, torch.from_numpy(table), make_pool(case, 300, rng))
        whole = got if whole is None else whole
        assert torch.equal(got, whole)


@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NATIVE)
def test_any_batch_and_any_number_of_threads_give_the_same_bits(name: str, kv: torch.dtype) -> None:
    """Requests of which most share a prefix: together, where it is read once, and each alone."""
    case = Case((400, 331, 260, 700, 392, 150), (1, 1, 1, 1, 1, 1), heads=10, kv=kv, shared=150)
    rng = np.random.default_rng(2)
    batch, num_slots = make_batch(case, rng)
    pool, qkv = make_pool(case, num_slots, rng), make_qkv(case, rng)
    threads = torch.get_num_threads()
    members, ends, lens = prefix_groups(batch.req_to_token.numpy(), batch.rows.numpy(), batch.seq_lens_host, batch.extend_lens_host)
    assert sorted(members) == [0, 1, 2, 3, 4, 5] and ends.tolist() == [6] and lens.tolist() == [SHARED_MIN]
    try:
        results = []
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            results.append(run(BACKENDS[name].make(pool), case, qkv, batch))
            alone = []
            for b in range(len(case.seq_lens)):
                one = slice(b, b + 1)
                single = ForwardBatch(
                    input_ids=batch.input_ids[one],
                    positions=batch.positions[one],
                    rows=batch.rows[one],
                    seq_lens=batch.seq_lens[one],
                    extend_lens=batch.extend_lens[one],
                    prefix_lens=batch.prefix_lens[one],
                    out_cache_loc=batch.out_cache_loc[one],
                    req_to_token=batch.req_to_token,
                    sample_tokens=torch.tensor([0]),
                    seq_lens_host=batch.seq_lens_host[one],
                    extend_lens_host=batch.extend_lens_host[one],
                    prefix_lens_host=batch.prefix_lens_host[one],
                )
                alone.append(run(BACKENDS[name].make(pool), case, qkv[one], single))
            results.append(torch.cat(alone))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("where", ["out_cache_loc", "req_to_token"])
def test_a_slot_outside_the_pool_is_refused(where: str) -> None:
    case = Case((5, 9), (1, 9))
    rng = np.random.default_rng(0)
    batch, num_slots = make_batch(case, rng)
    backend = BACKENDS[NATIVE[-1].values[0]].make(make_pool(case, num_slots, rng))
    backend.plan(batch)
    if where == "out_cache_loc":
        batch.out_cache_loc[3] = num_slots + 1
    else:
        batch.req_to_token[batch.rows[0], 2] = -1
    with pytest.raises(IndexError, match=rf"outside \[0, {num_slots + 1}\)"):
        backend.plan(batch)


def test_groups_are_rows_with_the_same_first_slots() -> None:
    table = np.arange(5 * 400, dtype=np.int32).reshape(5, 400)
    table[3, :200] = table[1, :200]
    table[4, :300] = table[1, :300]
    rows, seq_lens = np.array([1, 2, 3, 4]), np.array([390, 390, 390, 390])
    members, ends, lens = prefix_groups(table, rows, seq_lens, np.array([1, 1, 1, 1]))
    assert (members.tolist(), ends.tolist(), lens.tolist()) == ([0, 2, 3], [3], [192])
    members, _, lens = prefix_groups(table, rows, np.array([150, 390, 390, 140]), np.array([1, 1, 1, 1]))
    assert (members.tolist(), lens.tolist()) == ([0, 2, 3], [128])
    assert prefix_groups(table, rows, seq_lens, np.array([1, 1, 5, 9]))[0].size == 0


def test_levels_are_known() -> None:
    assert set(supported_levels()) <= set(LEVELS)
