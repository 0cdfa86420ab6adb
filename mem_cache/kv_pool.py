"""KVPool: the K and V of every layer, one slot per token."""

from __future__ import annotations

import torch


class KVPool:
    """K and V of all layers, each [num_slots + page_size, num_kv_heads, head_dim].

    Page 0 is scratch: padding reads it, so it starts as zeros and must stay finite. The rest is not touched here: the system
    gives it memory when it is first written.
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
    ) -> None:
        if num_slots < page_size or num_slots % page_size:
            raise ValueError(f"num_slots {num_slots} must be a positive multiple of the page size {page_size}")
        self.num_slots = num_slots
        self.page_size = page_size
        shape = (num_slots + page_size, num_kv_heads, head_dim)
        self._k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        for tensor in (*self._k, *self._v):
            tensor[:page_size].zero_()

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy k and v [T, num_kv_heads, head_dim] into slots int64 [T]. k and v are read only."""
        self._k[layer].index_copy_(0, slots, k)
        self._v[layer].index_copy_(0, slots, v)

    def k(self, layer: int) -> torch.Tensor:
        """The whole K of a layer, a view."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """The whole V of a layer, a view."""
        return self._v[layer]

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V at slots int64 [N]: two tensors [N, num_kv_heads, head_dim]."""
        return self._k[layer].index_select(0, slots), self._v[layer].index_select(0, slots)
