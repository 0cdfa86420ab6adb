"""Products whose rows do not depend on how many rows there are: the base of deterministic inference where torch computes.

A matrix product chooses its kernel, and so the order in which it sums up, by the number of rows. So the rows are padded to tiles of
a fixed height, and each tile is one product: a row's result is then the same bits whatever shares the step with it. That the place
in the tile does not matter either is no promise of the library, so it is tried for each weight when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

TILE = 8  # rows of one product: a decode step of one request reads the weights once either way


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear for x [T, in], tile by tile."""
    num_rows = x.shape[0]
    if not num_rows:
        return x.new_empty(0, weight.shape[0])
    num_tiles = -(-num_rows // TILE)
    padded = torch.zeros(num_tiles * TILE, x.shape[1], dtype=x.dtype, device=x.device)
    padded[:num_rows] = x
    return torch.cat([F.linear(tile, weight, bias) for tile in padded.chunk(num_tiles)])[:num_rows]


class InvariantProducts(TorchFunctionMode):
    """Within this context every F.linear is an invariant_linear."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return invariant_linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def check_invariance(weights: Iterable[torch.Tensor]) -> None:
    """Raises ValueError if, for one of the weights [out, in], the result of a row depends on its place in a tile."""
    seen = set()
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        if weight.numel() == 0 or (shape := (weight.shape, weight.dtype)) in seen:
            continue
        seen.add(shape)
        x = torch.randn(TILE, weight.shape[1], generator=generator).to(weight.dtype)
        y = F.linear(x, weight)
        if not all(torch.equal(F.linear(x.roll(shift, 0), weight), y.roll(shift, 0)) for shift in range(1, TILE)):
            raise ValueError(
                f"deterministic inference: this machine's matrix product of {list(weight.shape)} depends on the place of a row"
            )
