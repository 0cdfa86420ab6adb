"""Routing over the real scheduler in simulated time: looking at prefixes pays where caches are finite, and keeps the balance."""

from __future__ import annotations

import bench_routing as bench
import pytest


@pytest.mark.parametrize(("size", "gain"), [(2, 1.5), pytest.param(4, 2.0, marks=pytest.mark.nightly)])
def test_looking_at_prefixes_pays_where_caches_are_finite(size: int, gain: float) -> None:
    args = bench.parse(["--replicas", str(size), "--fit", "0.6", "--method", "round_robin", "cache_aware"])
    blind, aware = bench.measure(args)
    assert aware["reused_tokens"] >= gain * blind["reused_tokens"], (aware, blind)
    assert aware["imbalance"] < 1.3
    assert aware["ttft_p50"] < blind["ttft_p50"]
    assert bench.table([blind, aware]).count("cache_aware") == 1
