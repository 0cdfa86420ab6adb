"""Requests with a grammar in a scheduler turned by hand, under both loops: nothing that breaks a grammar gets out."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from grammars import DIGITS, FIRST, WORDS, grammar
from harness import EOS, Harness, prompt_of

from banyan.managers.constrained.constraint import Constraint, GrammarStore
from banyan.managers.constrained.grammar import CompiledGrammar, Matcher, create_backend
from banyan.managers.constrained.mask_filler import MaskFiller
from banyan.managers.constrained.step_masks import StepMasks
from banyan.managers.errors import RequestError
from banyan.managers.faults import Faults
from banyan.managers.io_struct import ControlReply, LoadGrammarReq

OBJECT = json.dumps(
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["ö", "x"]}}, "required": ["a", "b"]}
)


def submit(harness: Harness, rid: str, compiled: CompiledGrammar | Matcher, *, seed: int = 1, **options: Any) -> None:
    matcher = compiled.matcher() if hasattr(compiled, "matcher") else compiled
    harness.submit(rid, prompt_of(seed, 20), **{"max_new_tokens": 60, **options})
    harness.scheduler.live[rid].constraint = Constraint(matcher, WORDS.stop_ids)


def text_of(harness: Harness, rid: str) -> str:
    ids = harness.ids[rid]
    return bytes(token - FIRST for token in ids if token != EOS).decode()


def test_outputs_follow_their_grammars_beside_free_rows(make: Any) -> None:
    """GR-16: requests that share a compiled grammar do not share a state."""
    harness, digits = make(), grammar("regex", DIGITS)
    for seed in range(4):
        submit(harness, f"g{seed}", digits, seed=seed)
        harness.submit(f"free{seed}", prompt_of(seed + 50, 9), max_new_tokens=20, ignore_eos=True)
    harness.drain()
    texts = {text_of(harness, f"g{seed}") for seed in range(4)}
    assert len(texts) == 4
    for text in texts:
        assert text[-1] == "x" and text[:-1].isdigit() and 4 <= len(text) <= 13
    assert all(len(harness.ids[f"free{seed}"]) == 20 for seed in range(4))
    assert all(harness.reasons[f"g{seed}"].kind == "stop" for seed in range(4))


def test_retraction_and_chunks_change_nothing(make: Any) -> None:
    compiled = grammar("json_schema", OBJECT)
    outputs = []
    for options in ({}, {"faults": {"retract_every": 3}}, {"chunked_prefill_size": 16, "faults": {"alloc_fail": 0.3}}):
        harness = make(**options)
        for seed in range(3):
            submit(harness, f"g{seed}", compiled, seed=seed)
        harness.drain()
        outputs.append([text_of(harness, f"g{seed}") for seed in range(3)])
        for text in outputs[-1]:
            assert json.loads(text)["b"] in ("ö", "x")
    assert outputs[0] == outputs[1] == outputs[2]


class Broken:
    """A matcher over nothing that misbehaves at its third token."""

    def __init__(self, how: str) -> None:
        self.how, self.count = how, 0
        self.is_terminated = False

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = -1
        if self.count == 2 and self.how == "dead":
            row[:] = 0
        if self.count == 2 and self.how == "raise":
            raise RuntimeError("native")

    def accept(self, token_id: int) -> bool:
        self.count += 1
        return not (self.count == 3 and self.how == "refuse")


@pytest.mark.parametrize("how", ["dead", "raise", "refuse"])
def test_a_broken_grammar_ends_its_request_and_only_that(make: Any, how: str) -> None:
    """GR-02, GR-04."""
    harness = make()
    submit(harness, "bad", Broken(how), ignore_eos=True)  # type: ignore[arg-type]
    submit(harness, "good", grammar("regex", DIGITS), seed=2)
    harness.submit("free", prompt_of(3, 9), max_new_tokens=30, ignore_eos=True)
    harness.drain()
    assert harness.reasons["bad"].kind == "abort"
    assert harness.reasons["bad"].status_code == (400 if how == "dead" else 500)
    assert len(harness.ids["bad"]) <= 3
    assert harness.reasons["good"].kind == "stop" and len(harness.ids["free"]) == 30


class Slow:
    """A matcher that computes in its third look until it is let go."""

    is_terminated = False

    def __init__(self) -> None:
        self.count, self.go = 0, threading.Event()

    def fill_mask(self, row: np.ndarray) -> None:
        if self.count == 2:
            while not self.go.is_set():
                pass
        row[:] = -1

    def accept(self, token_id: int) -> bool:
        self.count += 1
        return True

    def forced_text(self) -> str:
        return ""


def test_a_grammar_that_takes_too_long_is_left_behind(make: Any) -> None:
    """The others go on, and the thread that was left behind changes nothing when it comes back."""
    harness = make()
    harness.scheduler.masks.filler = MaskFiller(0.2)
    slow = Slow()
    submit(harness, "good", grammar("regex", DIGITS), seed=2)
    submit(harness, "slow", slow, ignore_eos=True)  # type: ignore[arg-type]
    submit(harness, "late", grammar("regex", DIGITS), seed=3)
    harness.submit("free", prompt_of(3, 9), max_new_tokens=30, ignore_eos=True)
    harness.drain()
    slow.go.set()
    reason = harness.reasons["slow"]
    assert reason.status_code == 400 and "grammar-mask-timeout" in (reason.message or "")
    assert len(harness.ids["slow"]) == 2 and len(harness.ids["free"]) == 30
    assert {harness.reasons[rid].kind for rid in ("good", "late")} == {"stop"}
    submit(harness, "after", grammar("regex", DIGITS), seed=4)
    harness.drain()
    assert text_of(harness, "after")[-1] == "x"


def test_ends_without_regard_to_ignore_eos_and_min_new_tokens(make: Any) -> None:
    harness = make()
    submit(harness, "fixed", grammar("regex", "ab"), ignore_eos=True, min_new_tokens=30)
    submit(harness, "long", grammar("regex", "a*"), seed=2, min_new_tokens=30)
    harness.drain()
    assert text_of(harness, "fixed") == "ab" and harness.reasons["fixed"].kind == "stop"
    assert set(text_of(harness, "long")) == {"a"} and len(harness.ids["long"]) >= 30


def test_aborts_at_any_moment(make: Any) -> None:
    """Launched but not absorbed, with a mask that is not filled yet."""
    harness, digits = make(), grammar("regex", "[0-9]+")
    for turns in range(12):
        submit(harness, f"g{turns}", digits, seed=turns, max_new_tokens=100)
        submit(harness, f"h{turns}", digits, seed=turns + 40, max_new_tokens=9)
        harness.turn(turns)
        harness.abort(f"g{turns}")
        harness.drain()
        assert text_of(harness, f"h{turns}").isdigit()


def test_a_failing_step_fills_the_mask_of_the_next(make: Any) -> None:
    harness = make(faults={"step_fail": 3})
    submit(harness, "g", grammar("regex", "[0-9]{60}"), max_new_tokens=30)
    harness.drain()
    assert harness.reasons["g"].kind == "abort"
    harness.scheduler.faults = Faults(None)
    submit(harness, "h", grammar("regex", "[0-9]+"), max_new_tokens=30)
    harness.drain()
    assert harness.reasons["h"].kind in ("length", "stop")


def test_without_a_second_thread_no_mask_is_late(make: Any) -> None:
    harness = make()
    harness.scheduler.masks = StepMasks(harness.memory.table, harness.scheduler.abort, late=False)
    submit(harness, "g", grammar("regex", DIGITS))
    harness.submit("free", prompt_of(3, 9), max_new_tokens=30, ignore_eos=True)
    harness.drain()
    assert text_of(harness, "g")[-1] == "x" and len(harness.ids["free"]) == 30


def test_the_store_loads_drops_and_refuses() -> None:
    replies: list[ControlReply] = []
    store = GrammarStore(lambda: WORDS, replies.append)
    data = create_backend("xgrammar", WORDS).compile("regex", "ab")
    store.load(LoadGrammarReq(call_id=1, key="k", backend="xgrammar", data=data))
    one, two = store.constraint("k"), store.constraint("k")
    one.accept(FIRST + ord("a"))
    assert not one.failed
    two.accept(FIRST + ord("b"))
    assert two.failed
    store.load(LoadGrammarReq(call_id=2, key="bad", backend="xgrammar", data=b"no"))
    with pytest.raises(Exception):  # noqa: B017
        store.constraint("bad")
    store.drop("k")
    with pytest.raises(RequestError):
        store.constraint("k")
    store._pool.shutdown(wait=True)
    assert {(reply.call_id, reply.success) for reply in replies} == {(1, True), (2, False)}
