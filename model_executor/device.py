"""Where forward steps run, in order: a worker thread on CPU (or the caller's thread), streams on CUDA."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

from .step import SINGLE, RankSpec, StepHandle, timed_step
from .worker import InlineWorker, ThreadWorker, Worker

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Device(Protocol):
    """Runs calls in the order they come. All torch work of a process goes through one Device."""

    device: torch.device
    explain: dict[str, str]

    def run(self, call: Callable[[], T]) -> T:
        """Run a call after those submitted before, wait, return its value or raise its exception."""

    def submit(self, call: Callable[[], Sequence[torch.Tensor]]) -> StepHandle:
        """Enqueue a step; ``call`` returns, on the device, what StepOutput.of takes. wait() raises what the step raised."""

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device; on CPU the same memory. Called within a step only."""

    def upload_all(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Several arrays, in one copy."""

    def close(self) -> None:
        """Finish what was submitted and stop. Idempotent."""


def create_device(name: str, *, overlap: bool, ranks: RankSpec = SINGLE) -> Device:
    """Device of RunnerConfig.device: auto, cpu or cuda. Raises ValueError for what is not there.

    Of the ranks of one machine each gets a CUDA device of its own, or its share of the cores.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}; known are auto, cpu, cuda")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError("device cuda was asked for, but torch finds no CUDA device")
    why = "auto: torch finds a CUDA device" if has_cuda else "auto: torch finds no CUDA device"
    why = why if name == "auto" else "as given"
    if has_cuda and name != "cpu":
        if ranks.local_size > torch.cuda.device_count():
            raise ValueError(f"{ranks.local_size} ranks need as many CUDA devices, but torch finds {torch.cuda.device_count()}")
        torch.cuda.set_device(ranks.local_rank if ranks.local_size > 1 else torch.cuda.current_device())
        from .cuda_device import CudaDevice

        return CudaDevice(why)
    return CpuDevice(why, overlap=overlap, sharers=ranks.local_size)


class CpuDevice:
    """One thread runs everything, the loading of the model included; without overlap that is the caller's own, which then must
    always be the same."""

    def __init__(self, why: str, *, overlap: bool, sharers: int = 1) -> None:
        self.device = torch.device("cpu")
        self._worker: Worker = ThreadWorker() if overlap else InlineWorker()
        num_threads, threads_why = num_compute_threads(sharers)
        self.explain = {"device": f"cpu ({why})", "threads": f"{num_threads} ({threads_why})"}
        self.run(lambda: _set_threads(num_threads))

    def run(self, call: Callable[[], T]) -> T:
        return self._worker.submit(call).wait()

    def submit(self, call: Callable[[], Sequence[torch.Tensor]]) -> StepHandle:
        return self._worker.submit(lambda: timed_step(lambda: [tensor.numpy() for tensor in call()]))

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def upload_all(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def close(self) -> None:
        self._worker.close()


def _set_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() == 1:
        return
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError as error:  # torch allows it only before any parallel work of the process
        logger.warning("torch keeps %d inter-op threads: %s", torch.get_num_interop_threads(), error)


def num_compute_threads(sharers: int = 1) -> tuple[int, str]:
    """Threads of a forward pass and why: OMP_NUM_THREADS, else its share of the physical cores that the process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given), "OMP_NUM_THREADS"
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    share = f", shared by {sharers} ranks" if sharers > 1 else ""
    return max(len(cores) // sharers, 1), f"physical cores among the {len(allowed)} allowed CPUs{share}"


def _siblings(cpu: int) -> str:
    """Name of the core that a logical CPU belongs to."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text().strip() if path.exists() else str(cpu)
