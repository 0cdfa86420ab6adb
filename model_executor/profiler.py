"""Profiles of forward steps: torch's profiler, and a Chrome trace for each rank."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .step import ProfileSpec

logger = logging.getLogger(__name__)

ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


class StepProfiler:
    """Records what runs on the thread that calls it, from ``start`` or after so many steps, until ``stop`` or after so many."""

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self._spec: ProfileSpec | None = None
        self._profile: profile | None = None
        self._num_steps = 0
        self.path: str | None = None  # of the newest trace

    def start(self, spec: ProfileSpec) -> None:
        """Raises ValueError while a profile is under way or if none of the activities is there, OSError for a folder that cannot
        be made."""
        if self._spec is not None:
            raise ValueError("a profile is under way; stop it first")
        if not _present(spec):
            raise ValueError("activities: none of them is to be had on this machine; it has " + ", ".join(_available()))
        Path(spec.folder).mkdir(parents=True, exist_ok=True)
        self._spec, self._num_steps, self.path = spec, 0, None
        if not spec.start_step:
            self._begin(spec)

    def step(self) -> None:
        """A step is about to run."""
        spec = self._spec
        if spec is None:
            return
        if self._profile is None and self._num_steps >= spec.start_step:
            self._begin(spec)
        if spec.num_steps is not None and self._num_steps >= spec.start_step + spec.num_steps:
            self._stop_quietly()
        self._num_steps += 1

    def _stop_quietly(self) -> None:
        """A trace that cannot be written is no reason why a step should fail."""
        try:
            self.stop()
        except (OSError, RuntimeError):
            logger.exception("the profile was not written")

    def stop(self) -> str:
        """Write the trace; its path. Raises ValueError if nothing was recorded."""
        spec, running = self._spec, self._profile
        self._spec = self._profile = None
        if spec is None:
            if self.path is None:
                raise ValueError("no profile is under way")
            return self.path
        if running is None:
            raise ValueError(f"only {self._num_steps} steps ran, none of which was to be recorded")
        running.stop()
        prefix = f"{spec.prefix}-" if spec.prefix else ""
        path = os.path.join(spec.folder, f"{prefix}{spec.name or int(time.time())}-{self._rank}-{os.getpid()}.trace.json.gz")
        running.export_chrome_trace(path)
        self.path = path
        return path

    def _begin(self, spec: ProfileSpec) -> None:
        self._profile = profile(activities=_present(spec), with_stack=spec.with_stack, record_shapes=spec.record_shapes)
        self._profile.start()


def _available() -> list[str]:
    return [name for name in ACTIVITIES if name != "GPU" or torch.cuda.is_available()]


def _present(spec: ProfileSpec) -> list[ProfilerActivity]:
    """Those that are wanted and there."""
    return [ACTIVITIES[name] for name in _available() if name in spec.activities]
