"""Host arrays to a device, without waiting for them."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device: on a CPU the same memory, else a copy that the current stream makes from pinned memory."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
