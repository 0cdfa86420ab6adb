"""The thinking part of outputs: no grammar inside, marks of several tokens, budgets under both loops and after retractions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grammars import DIGITS, FIRST, WORDS, grammar
from harness import EOS, VOCAB, Harness, prompt_of

from banyan.managers.constrained.constraint import Constraint
from banyan.managers.constrained.grammar import Matcher
from banyan.managers.constrained.thinking import Phase, Thinking, ThinkingParams, ThinkingPlanner
from banyan.managers.errors import RequestError
from banyan.managers.reasoning.marks import REASONING_MARKS

START, END = b"<t>", b"</t>"
BYTES = [*WORDS.tokens[: FIRST + 256], b".</", b"t>\n", *[b""] * (VOCAB - FIRST - 258)]
DOT_SLASH, T_NEWLINE = FIRST + 256, FIRST + 257


def ids_of(text: bytes) -> list[int]:
    return [FIRST + byte for byte in text]


def thinking(*, is_open: bool = True, budget: int | None = None) -> Thinking:
    params = ThinkingParams(start_ids=ids_of(START), end_ids=ids_of(END), is_open=is_open, budget=budget)
    return Thinking(params, BYTES.__getitem__)


def constraint(matcher: Matcher | None, **options: Any) -> Constraint:
    return Constraint(matcher, WORDS.stop_ids, thinking(**options))


def push(target: Constraint, text: bytes) -> Constraint:
    for token_id in ids_of(text):
        target.accept(token_id)
    return target


def allowed(target: Constraint) -> set[int]:
    row = np.zeros(WORDS.mask_width, np.int32)
    target.fill(row, may_stop=True)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little", count=VOCAB)).tolist())


def digits() -> Matcher:
    return grammar("regex", DIGITS).matcher()


NUMBERS = set(ids_of(b"0123456789"))


def test_the_grammar_begins_behind_the_thinking() -> None:
    """GR-12: the mark that ends it may have several tokens; the text cannot end before."""
    inside = push(constraint(digits()), b"why </ t></t")
    assert allowed(inside) == set(range(VOCAB)) - {EOS}
    assert allowed(push(inside, b">")) == NUMBERS
    assert not push(inside, b"123x").failed and not inside.is_complete
    assert allowed(inside) == {EOS}
    inside.accept(EOS)
    assert inside.is_complete


def test_a_mark_is_found_however_its_bytes_are_split() -> None:
    inside = constraint(digits())
    for token_id in (*ids_of(b"a"), DOT_SLASH, T_NEWLINE):
        inside.accept(token_id)
    assert inside.thinking is not None and inside.thinking.phase is Phase.OVER
    assert allowed(inside) == NUMBERS


def test_an_output_may_open_the_thinking_or_leave_it_out() -> None:
    assert allowed(constraint(digits(), is_open=False)) == NUMBERS | {ids_of(START)[0]}
    opening = push(constraint(digits(), is_open=False), b"<t")
    assert allowed(opening) == set(ids_of(b">"))
    assert allowed(push(opening, b">hm</t>")) == NUMBERS
    direct = push(constraint(digits(), is_open=False), b"1")
    assert allowed(direct) == NUMBERS and not direct.failed
    assert push(constraint(digits(), is_open=False), b"<t1").failed, "neither the mark nor the grammar"


def test_a_grammar_may_begin_like_the_mark() -> None:
    """Both ways stay open until they part."""
    matcher = grammar("regex", "<[tx]+!").matcher()
    both = push(constraint(matcher, is_open=False), b"<t")
    assert allowed(both) == set(ids_of(b">tx!"))
    assert allowed(push(both, b"x")) == set(ids_of(b"tx!"))


@pytest.mark.parametrize("budget", [0, 3, 5])
def test_a_spent_budget_forces_the_end_mark(budget: int) -> None:
    spent = push(constraint(digits(), budget=budget), b"x" * budget)
    for token_id in ids_of(END):
        assert allowed(spent) == {token_id}
        spent.accept(token_id)
    assert allowed(spent) == NUMBERS


def test_a_half_written_mark_is_completed() -> None:
    spent = push(constraint(None, budget=5), b"abc</")
    assert allowed(spent) == set(ids_of(b"t"))
    assert allowed(push(spent, b"t>")) == set(range(VOCAB))


def outputs(harness: Harness, *, budget: int, grammatical: bool) -> list[list[int]]:
    for seed in range(3):
        harness.submit(f"t{seed}", prompt_of(seed, 20), max_new_tokens=40, ignore_eos=True)
        matcher = digits() if grammatical else None
        harness.scheduler.live[f"t{seed}"].constraint = constraint(matcher, budget=budget)
        harness.submit(f"free{seed}", prompt_of(seed + 9, 9), max_new_tokens=15, ignore_eos=True)
    harness.drain()
    return [harness.ids[f"t{seed}"] for seed in range(3)]


@pytest.mark.parametrize("grammatical", [False, True])
def test_budgets_hold_in_a_scheduler_whatever_comes_between(make: Any, grammatical: bool) -> None:
    seen = []
    for options in ({}, {"faults": {"retract_every": 3}}, {"chunked_prefill_size": 16, "faults": {"alloc_fail": 0.3}}):
        seen.append(outputs(make(**options), budget=6, grammatical=grammatical))
        for ids in seen[-1]:
            assert ids[6:10] == ids_of(END)
            if grammatical:
                text = bytes(token - FIRST for token in ids[10:] if token != EOS).decode()
                assert text[-1] == "x" and text[:-1].isdigit()
    assert seen[0] == seen[1] == seen[2]


class Letters:
    """Token ids are code points."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def test_a_prompt_may_have_opened_or_closed_the_thinking() -> None:
    letters = Letters()
    optional, forced = ThinkingPlanner("qwen3", letters), ThinkingPlanner("deepseek-r1", letters)

    def state(planner: ThinkingPlanner, prompt: str) -> bool | None:
        params = planner.params(letters.encode(prompt), 7)
        return params.is_open if params else None

    assert state(optional, "user: <think>\nassistant:") is False
    assert state(optional, "assistant: <think>\n") is True
    assert state(optional, "assistant: <think>\n\n</think>\n\n") is None
    assert state(forced, "assistant:") is True
    assert state(ThinkingPlanner(None, letters), "assistant:") is None
    assert len(REASONING_MARKS) > 10


def test_what_needs_a_parser_says_so() -> None:
    planner = ThinkingPlanner(None, Letters())
    planner.check(wanted=False, budget=None)
    for wanted, budget, name in ((True, None, "require_reasoning"), (False, 3, "max_thinking_tokens")):
        with pytest.raises(RequestError) as caught:
            planner.check(wanted=wanted, budget=budget)
        assert caught.value.param == name and caught.value.status_code == 400
    with pytest.raises(RequestError):
        ThinkingPlanner("qwen3", Letters()).check(wanted=True, budget=-1)
