"""What attention.h is told: a layer's KV and a step, as structs over tensors whose dtype, layout and bounds were checked."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch

from ....mem_cache.kv_pool import KVPool
from ...attention.base import AttentionSpec
from ...forward_batch import ForwardBatch

TILE = 64  # keys of a tile in attend.h: prefixes are shared in whole tiles
SHARED_MIN = 2 * TILE  # slots that rows must have in common to be read together
_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class KVStruct(ctypes.Structure):
    """bny_kv."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("type", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("heads", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int64),
    )


class StepStruct(ctypes.Structure):
    """bny_step."""

    _fields_ = (
        ("table", c_void_p),
        ("rows", c_void_p),
        ("seq_lens", c_void_p),
        ("extend_lens", c_void_p),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("members", c_void_p),
        ("group_ends", c_void_p),
        ("group_lens", c_void_p),
        ("table_stride", c_int64),
        ("num_requests", c_int64),
        ("num_tokens", c_int64),
        ("num_groups", c_int64),
    )


def supports(pool: KVPool) -> str | None:
    """None if the kernels can use the pool, else why not."""
    tensor = pool.k(0)
    if tensor.device.type != "cpu":
        return f"the KV cache is on {tensor.device.type}"
    if tensor.dtype not in _KV_TYPES:
        return f"the KV cache is {tensor.dtype}"
    return None


def kv_struct(pool: KVPool, layer: AttentionSpec) -> KVStruct:
    """The struct of one layer. It points into the pool, which must outlive it. Raises ValueError where it does not fit."""
    if (reason := supports(pool)) is not None:
        raise ValueError(reason)
    k, v = pool.k(layer.layer_id), pool.v(layer.layer_id)
    shape = (pool.num_slots + pool.page_size, layer.num_kv_heads, layer.head_dim)
    if not (k.shape == v.shape == shape and k.is_contiguous() and v.is_contiguous() and k.dtype == v.dtype):
        raise ValueError(f"layer {layer.layer_id} needs contiguous K and V {shape}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if layer.num_heads % layer.num_kv_heads:
        raise ValueError(f"{layer.num_heads} query heads do not divide among {layer.num_kv_heads} KV heads")
    scales = pool.scales(layer.layer_id)
    return KVStruct(
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_scale=scales[0].data_ptr() if scales else None,
        v_scale=scales[1].data_ptr() if scales else None,
        type=_KV_TYPES[k.dtype],
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        heads=layer.num_heads,
        scale=layer.scale,
        soft_cap=layer.soft_cap or 0.0,
        window=layer.sliding_window or 0,
    )


class NativeStep:
    """A step's struct, with the arrays that it points to."""

    def __init__(self, batch: ForwardBatch, num_slots: int, *, share_prefixes: bool) -> None:
        """num_slots: of the pool, its scratch page included. Raises IndexError for a slot outside it."""
        table = batch.req_to_token
        rows = batch.rows.numpy()
        longest = int(batch.seq_lens_host.max(initial=0))
        if not (table.dtype == torch.int32 and table.stride(1) == 1 and batch.out_cache_loc.dtype == torch.int64):
            raise ValueError("req_to_token must be int32 with adjacent cells, out_cache_loc int64")
        if rows.min(initial=0) < 0 or rows.max(initial=0) >= table.shape[0] or longest > table.shape[1]:
            raise IndexError(f"a row or a length is outside req_to_token {tuple(table.shape)}")
        extend_lens = np.ascontiguousarray(batch.extend_lens_host, np.int64)
        starts = np.cumsum(extend_lens) - extend_lens
        seq_lens = np.ascontiguousarray(batch.seq_lens_host, np.int64)
        members, ends, lens = prefix_groups(table.numpy(), rows, seq_lens, extend_lens) if share_prefixes else _NO_GROUPS
        self.arrays = [rows, seq_lens, extend_lens, starts, batch.out_cache_loc, table, members, ends, lens]
        self.struct = StepStruct(
            table=table.data_ptr(),
            rows=rows.ctypes.data,
            seq_lens=seq_lens.ctypes.data,
            extend_lens=extend_lens.ctypes.data,
            starts=starts.ctypes.data,
            slots=batch.out_cache_loc.data_ptr(),
            members=members.ctypes.data,
            group_ends=ends.ctypes.data,
            group_lens=lens.ctypes.data,
            table_stride=table.stride(0),
            num_requests=len(rows),
            num_tokens=int(extend_lens.sum()),
            num_groups=len(ends),
        )
        if self.struct.num_tokens != len(batch.out_cache_loc):
            raise ValueError(f"{self.struct.num_tokens} tokens are computed, {len(batch.out_cache_loc)} slots are given")
        self.num_slots = num_slots

    def check(self, lib: ctypes.CDLL) -> None:
        """Raises IndexError if a slot of the step is outside the pool: what the kernels would read or overwrite is not theirs."""
        if (found := lib.bny_check_slots(ctypes.byref(self.struct), self.num_slots)) >= 0:
            raise IndexError(f"token or request {found} of the step has a slot outside [0, {self.num_slots})")


_EMPTY = np.zeros(0, np.int64)
_NO_GROUPS = (_EMPTY, _EMPTY, _EMPTY)


def prefix_groups(
    table: np.ndarray, rows: np.ndarray, seq_lens: np.ndarray, extend_lens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests that compute one token each and whose rows start with the same slots: (members, ends of groups, shared lengths).

    A group shares at least SHARED_MIN slots, a multiple of TILE.
    """
    candidates = np.flatnonzero((extend_lens == 1) & (seq_lens > SHARED_MIN))
    if len(candidates) < 2:
        return _NO_GROUPS
    found: dict[bytes, list[int]] = {}
    for b in candidates:
        found.setdefault(table[rows[b], :SHARED_MIN].tobytes(), []).append(int(b))
    members: list[int] = []
    ends, lens = [], []
    for group in found.values():
        if len(group) < 2:
            continue
        length = int(seq_lens[group].min()) - 1
        same = (table[rows[group], :length] == table[rows[group[0]], :length]).all(axis=0)
        shared = length if same.all() else int(same.argmin())
        members += group
        ends.append(len(members))
        lens.append(shared // TILE * TILE)
    return np.array(members, np.int64), np.array(ends, np.int64), np.array(lens, np.int64)
