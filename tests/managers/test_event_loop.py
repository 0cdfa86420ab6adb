"""The order in which the loops receive, decide, launch and absorb."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from banyan.managers.event_loop import LONG_STEP, NormalLoop, OverlapLoop, PipelineLoop, make_loop


class Steps:
    """Verbs over steps of given numbers of tokens; what was done, in order."""

    def __init__(self, *sizes: int) -> None:
        self.names = iter("abcdefgh")
        self.sizes = list(sizes)
        self.done: list[str] = []
        self.given_up: list[str] = []  # or would have been, if nobody waited

    def receive(self, in_flight: bool) -> None:
        self.done.append("receive" + "+" * in_flight)

    def next_batch(self, *, in_flight: bool) -> Any:
        self.done.append("decide" + "+" * in_flight)
        if not self.sizes:
            return None
        return SimpleNamespace(name=next(self.names), step=SimpleNamespace(input_ids=range(self.sizes.pop(0))))

    def launch(self, batch: Any) -> Any:
        self.done.append(f"launch {batch.name}")
        return batch.name

    def give_up(self, batch: Any) -> None:
        self.given_up.append(batch.name)

    def absorb(self, batch: Any, handle: Any) -> None:
        assert handle == batch.name
        self.done.append(f"absorb {batch.name}")


def turns(loop: Any, steps: Steps, count: int) -> list[list[str]]:
    found = []
    for _ in range(count):
        loop.turn()
        found.append(steps.done[:])
        steps.done.clear()
    return found


def test_short_steps_overlap() -> None:
    steps = Steps(7, 7)
    assert turns(OverlapLoop(steps, steps.receive, long_step=8), steps, 4) == [
        ["receive", "decide", "launch a"],
        ["receive+", "decide+", "launch b", "absorb a"],
        ["receive+", "decide+", "absorb b"],
        ["receive", "decide"],
    ]
    assert steps.given_up == ["b"], "once the results of the one before are in"


def test_what_comes_during_a_long_step_is_seen_before_the_next() -> None:
    steps = Steps(7, 8, 9, 7)
    assert turns(OverlapLoop(steps, steps.receive, long_step=8), steps, 7) == [
        ["receive", "decide", "launch a"],
        ["receive+", "decide+", "launch b", "absorb a"],
        ["receive+", "absorb b"],
        ["receive", "decide", "launch c"],
        ["receive+", "absorb c"],
        ["receive", "decide", "launch d"],
        ["receive+", "decide+", "absorb d"],
    ]


@pytest.mark.parametrize(
    ("overlap", "device", "stages", "kind"),
    [
        (True, "cpu", 1, OverlapLoop),
        (True, "cuda", 1, OverlapLoop),
        (False, "cpu", 1, NormalLoop),
        (True, "cpu", 2, PipelineLoop),
    ],
)
def test_the_loop_of_a_model(overlap: bool, device: str, stages: int, kind: type) -> None:
    steps = Steps(LONG_STEP["cpu"], 1)
    loop = make_loop(steps, steps.receive, overlap=overlap, model=SimpleNamespace(device=device, stages=stages))  # type: ignore[arg-type]
    assert type(loop) is kind
    waits = turns(loop, steps, 2)[1] == ["receive+", "absorb a"]
    assert waits == (kind is OverlapLoop and device == "cpu")
