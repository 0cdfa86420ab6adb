"""KVPool: the K and V of every layer, one slot per token."""

from __future__ import annotations

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class KVPool:
    """K and V of all layers, each [num_slots + page_size, num_kv_heads, head_dim].

    Page 0 is scratch: padding reads it, so it starts as zeros and must stay finite. The rest is not touched here: the system
    gives it memory when it is first written.

    What is computed in ``compute_dtype`` may be stored in another dtype. int8 holds round(x / s) with a float32 scale s for each
    slot and head, the one that maps the greatest of the head's values to 127. float8 has no scales; what it cannot hold becomes the
    greatest that it can.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if num_slots < page_size or num_slots % page_size:
            raise ValueError(f"num_slots {num_slots} must be a positive multiple of the page size {page_size}")
        self.num_slots = num_slots
        self.page_size = page_size
        self.compute_dtype = compute_dtype or (torch.float32 if dtype is torch.int8 else dtype)
        shape = (num_slots + page_size, num_kv_heads, head_dim)
        self._k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        num_scales = 2 * num_layers if dtype is torch.int8 else 0
        self._scales = [torch.empty(shape[:2], dtype=torch.float32, device=device) for _ in range(num_scales)]
        for tensor in (*self._k, *self._v, *self._scales):
            tensor[:page_size].zero_()

    @property
    def exact(self) -> bool:
        """Whether what is read is what was written."""
        return self._k[0].dtype is self.compute_dtype

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy k and v [T, num_kv_heads, head_dim] into slots int64 [T]. k and v are read only."""
        for i, (pool, x) in enumerate(((self._k[layer], k), (self._v[layer], v))):
            if self._scales:
                x, scale = _quantise(x)
                self._scales[2 * layer + i].index_copy_(0, slots, scale)
            if pool.dtype in FLOAT8:  # indexed as bytes: torch has no such operation for them
                most = torch.finfo(pool.dtype).max
                pool.view(torch.uint8).index_copy_(0, slots, x.clamp(-most, most).to(pool.dtype).view(torch.uint8))
            else:
                pool.index_copy_(0, slots, x.to(pool.dtype))

    def k(self, layer: int) -> torch.Tensor:
        """The whole K of a layer, a view."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """The whole V of a layer, a view."""
        return self._v[layer]

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of int8: the scales of a layer's K and V, views [slots, num_kv_heads]."""
        return (self._scales[2 * layer], self._scales[2 * layer + 1]) if self._scales else None

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V at slots int64 [N] in compute_dtype: two tensors [N, num_kv_heads, head_dim]."""
        k, v = _rows(self._k[layer], slots), _rows(self._v[layer], slots)
        if self._scales:
            k_scale, v_scale = (scale.index_select(0, slots)[..., None] for scale in self._scales[2 * layer : 2 * layer + 2])
            k, v = k * k_scale, v * v_scale
        return k.to(self.compute_dtype), v.to(self.compute_dtype)


def _rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if pool.dtype in FLOAT8:
        return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype)
    return pool.index_select(0, slots)


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers, as floats, and their scales."""
    x = x.float()
    top = x.abs().amax(dim=-1)
    return (x * (127.0 / top).nan_to_num_(posinf=0.0)[..., None]).round_(), top / 127.0
