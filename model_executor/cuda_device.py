"""Where forward steps run on a GPU: three streams, and no wait of the host but for a step's results.

Steps run one after the other on the forward stream. What a step needs comes on the copy stream, from pinned memory, while the step
before computes; what it returns leaves on a stream of its own, so that the next step does not queue behind the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from .packing import fill, layout, views
from .step import StepHandle, StepOutput
from .worker import Handle

T = TypeVar("T")


class CudaDevice:
    """The host enqueues a step on the thread that calls submit and waits for an event. Tensors that cross streams are recorded on
    both, so that the caching allocator does not hand their memory out too early."""

    def __init__(self, why: str) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.explain = {"device": f"{torch.cuda.get_device_name(self.device)} ({why})"}
        self.stream, self._copy_in, self._copy_out = (
            torch.cuda.Stream(self.device),  # type: ignore[no-untyped-call]
            torch.cuda.Stream(self.device),  # type: ignore[no-untyped-call]
            torch.cuda.Stream(self.device),  # type: ignore[no-untyped-call]
        )

    def run(self, call: Callable[[], T]) -> T:
        """As Device.run."""
        with torch.cuda.stream(self.stream):
            value = call()
        self.stream.synchronize()
        return value

    def submit(self, call: Callable[[], Sequence[torch.Tensor]]) -> StepHandle:
        """As Device.submit."""
        handle: Handle[StepOutput] = Handle()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            begin.record(self.stream)
            handle.run(lambda: StepOutput.of(self._download(call())))
        end.record(self._copy_out)
        return _CudaStepHandle(handle, begin, end)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """As Device.upload."""
        return self.upload_all([array])[0]

    def upload_all(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """As Device.upload_all: one pinned buffer, one copy. The forward stream waits for it, the host does not."""
        size, parts = layout(arrays)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        fill(host.numpy(), arrays, parts)
        with torch.cuda.stream(self._copy_in):
            on_device = host.to(self.device, non_blocking=True)
        self.stream.wait_stream(self._copy_in)
        on_device.record_stream(self.stream)
        return views(on_device, parts)

    def close(self) -> None:
        """As Device.close."""
        torch.cuda.synchronize(self.device)

    def _download(self, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        """Pinned copies, complete once the event behind them is."""
        self._copy_out.wait_stream(self.stream)
        arrays = []
        with torch.cuda.stream(self._copy_out):
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copy_out)
                arrays.append(host.numpy())
        return arrays


class _CudaStepHandle:
    def __init__(self, handle: Handle[StepOutput], begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._handle, self._begin, self._end = handle, begin, end

    def done(self) -> bool:
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> StepOutput:
        self._end.synchronize()
        output = self._handle.wait()
        output.elapsed = self._begin.elapsed_time(self._end) / 1e3
        return output
