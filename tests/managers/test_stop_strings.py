from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.stop_strings import StopMatcher


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    shown = [matcher.push(piece)[0] for piece in pieces]
    return [*shown, matcher.finish()], matcher.matched


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, position by position: smallest end, then smallest start."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_any_chunking_shows_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    shown, matched = feed(StopMatcher(stops), pieces)
    assert ("".join(shown), matched) == expected("".join(pieces), stops)


@settings(max_examples=200)
@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=10),
    st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=3),
)
def test_exactly_the_longest_possible_start_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        new, matched = matcher.push(piece)
        shown += new
        if matched is not None:
            return
        held = max(n for n in range(len(seen) + 1) if n == 0 or any(len(stop) > n and stop.startswith(seen[-n:]) for stop in stops))
        assert shown == seen[: len(seen) - held]


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["five"])
    assert matcher.push("four fi") == ("four ", None)
    assert matcher.push("ve six") == ("", "five")
    assert matcher.push("seven") == ("", "five")
    assert matcher.finish() == ""


def test_the_held_tail_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("a\n") == ("a", None)
    assert matcher.finish() == "\n"
    assert matcher.finish() == ""


def test_empty_stops_match_nothing() -> None:
    matcher = StopMatcher(["", ""])
    assert matcher.push("abc") == ("abc", None)


@pytest.mark.parametrize("stop", ["a" * 1023 + "b", "ab" * 511 + "c"])
def test_hostile_stops_cost_a_bounded_number_of_looks_per_character(stop: str) -> None:
    """Thirty-two stops that nearly match, one of them long: a start that was ruled out is not looked at again."""
    looks = 0

    class Counting(str):
        __slots__ = ()

        def startswith(self, *args: Any) -> bool:
            nonlocal looks
            looks += 1
            return super().startswith(*args)

    matcher = StopMatcher([*(Counting(stop[:2] + str(n)) for n in range(31)), Counting(stop)])
    text = (stop[:2] * 2000)[:3000]
    shown = "".join(matcher.push(char)[0] for char in text)
    assert shown + matcher.finish() == text
    assert looks <= 2 * 32 * len(text)
