"""The threads of the native kernels: pieces, not teams."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from banyan.layers.kernels.cpu.build import supported_levels
from banyan.layers.kernels.cpu.library import load
from banyan.layers.kernels.cpu.packed import Kind, PackedLinear, PackedWeight


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_linear() -> tuple[PackedLinear, torch.Tensor]:
    native = load(supported_levels()[-1])
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(700, 96, generator=generator), torch.randn(9, 96, generator=generator)
    return PackedLinear([PackedWeight.pack(native, Kind.F32, weight)], None), x


def test_the_number_of_threads_may_change_at_any_time() -> None:
    linear, x = make_linear()
    torch.set_num_threads(1)
    expected = linear(x)
    for count in (4, 1, 2, 9, 3, 2) * 20:
        torch.set_num_threads(count)
        assert torch.equal(linear(x), expected)


def test_calls_of_two_threads_do_not_mix() -> None:
    linear, x = make_linear()
    torch.set_num_threads(3)
    expected, wrong = linear(x), []

    def call() -> None:
        torch.set_num_threads(3)
        own, rows = make_linear()
        wrong.extend(i for i in range(200) if not torch.equal(own(rows), expected))

    others = [threading.Thread(target=call) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_of_fork_computes_too() -> None:
    linear, x = make_linear()
    torch.set_num_threads(2)
    expected = linear(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
