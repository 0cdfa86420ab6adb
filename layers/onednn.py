"""Linears whose weights oneDNN keeps in an order of its own, reordered once at load: what torch multiplies fastest on a CPU without
the native kernels. The operators are private to torch, so it is tried out whether they are there and compute this dtype.
"""

from __future__ import annotations

import functools

import torch

_OPS = torch.ops.mkldnn


class ReorderedLinear:
    """y = x W^T + b. The row-major weight is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [n, k], of a dtype for which ``why_not_reordered`` is None."""
        self.n = weight.shape[0]
        self.nbytes = weight.numel() * weight.element_size()
        self._bias = bias
        self._weight = _OPS._reorder_linear_weight(weight.detach(), None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, k] -> [T, n] in the dtype of the weight."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.n)
        y: torch.Tensor = _OPS._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


@functools.cache
def why_not_reordered(dtype: torch.dtype) -> str | None:
    """Why torch on this machine cannot multiply by reordered weights of a dtype; None if it can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"not for {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    weight = torch.eye(32, dtype=dtype)
    try:
        y = ReorderedLinear(weight, None)(weight)
    except (RuntimeError, AttributeError, NotImplementedError) as error:  # no such operator, or no such instructions
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None if torch.equal(y, weight) else "its products are wrong"
