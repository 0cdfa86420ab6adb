"""The order of the waiting queue: pure functions of plain numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

POLICIES = ("fcfs", "lpm")


def order_fcfs(arrivals: np.ndarray, prefix_lens: np.ndarray) -> np.ndarray:
    """First come, first served."""
    return np.argsort(arrivals, kind="stable")


def order_lpm(arrivals: np.ndarray, prefix_lens: np.ndarray) -> np.ndarray:
    """Longest cached prefix first; equals in the order of their arrival."""
    return np.lexsort((arrivals, -prefix_lens))


ORDERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"fcfs": order_fcfs, "lpm": order_lpm}


def needs_matches(policy: str) -> bool:
    """Whether the order depends on what the cache holds."""
    return policy == "lpm"
