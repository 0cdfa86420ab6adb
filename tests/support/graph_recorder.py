"""Stands for CUDA graphs on a CPU: what is done while it records is replayed operation by operation, into the tensors that the
recording used. So a test sees what a graph does: a value that was read on the host, or a tensor that is another now, stays as it
was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.ops:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and not x.is_mkldnn]
            inputs = {x.untyped_storage().data_ptr() for x in given}
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(out), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in inputs:
                    old.copy_(new)


class OpRecorder:
    """A Recorder and a PieceRecorder. ``replays`` counts pieces and steps that were replayed."""

    def __init__(self) -> None:
        self.replays = 0
        self.recorded = 0
        self._tape: _Tape | None = None

    def begin(self) -> None:
        assert self._tape is None, "one recording within another"
        self._tape = _Tape()
        self._tape.__enter__()

    def end(self) -> Callable[[], None]:
        tape = self._tape
        assert tape is not None
        tape.__exit__(None, None, None)
        self._tape = None
        self.recorded += 1

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.begin()
        output = call()
        return self.end(), output
