"""Stop patterns: against Python's re, over random patterns, texts and cuts."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.stop_regex import RegexError, RegexMatcher, num_states

SINGLES = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", r"\.", "[a-c1]", r"[\d-]", "é", "[]a]", r"\x61"])


def combine(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    grouped = parts.map(lambda part: f"(?:{part})")
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(grouped, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{1,}", "*?"])).map("".join),
    )


PATTERNS = st.recursive(SINGLES, combine, max_leaves=6)
TEXTS = st.text("abc1.-é\n", max_size=12)


def first_match(patterns: list[str], text: str) -> tuple[int, int] | None:
    """(end, start) of the match that ends first, the one of those that starts first, by trying every span."""
    spans = [
        (end, start)
        for end in range(1, len(text) + 1)
        for start in range(end)
        if any(re.fullmatch(pattern, text[start:end], re.ASCII) for pattern in patterns)
    ]
    return min(spans) if spans else None


def run(matcher: RegexMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        new, matched = matcher.push(piece)
        shown += new
        if matched is not None:
            return shown, matched
    return shown + matcher.finish(), None


@settings(max_examples=150, deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=2), TEXTS, st.lists(st.integers(0, 12), max_size=5))
def test_finds_what_re_finds_however_the_text_is_cut(patterns: list[str], text: str, cuts: list[int]) -> None:
    if any(re.fullmatch(pattern, "", re.ASCII) for pattern in patterns):
        with pytest.raises(RegexError, match="empty"):
            RegexMatcher(patterns)
        return
    ends = sorted({0, len(text), *[cut for cut in cuts if cut < len(text)]})
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    matcher = RegexMatcher(patterns)
    shown, matched = run(matcher, pieces)
    span = first_match(patterns, text)
    if span is None:
        assert (shown, matched) == (text, None)
    else:
        end, start = span
        assert shown == text[:start]
        assert matcher.matched_text == text[start:end]
        assert matched in patterns


@settings(max_examples=100, deadline=None)
@given(PATTERNS, TEXTS)
def test_holds_back_only_what_may_still_match(pattern: str, text: str) -> None:
    """Whatever is shown is in no match that some continuation would complete."""
    if re.fullmatch(pattern, "", re.ASCII):
        return
    matcher = RegexMatcher([pattern])
    shown, matched = matcher.push(text)
    if matched is not None:
        return
    for more in ("a", "b", "c", "1", ".", "ab", "a1", "bca", "\na", "éa", "-a"):
        span = first_match([pattern], text + more)
        assert span is None or span[1] >= len(shown)


def test_nothing_is_held_back_without_need() -> None:
    assert RegexMatcher([r"\d{3}END"]).push("abc 12")[0] == "abc "
    assert RegexMatcher([r"\d{3}END"]).push("abc 12x")[0] == "abc 12x"


def test_strings_and_patterns_together_the_first_to_end_wins() -> None:
    matcher = RegexMatcher([r"b+c"], ["bbc", "ab"])
    assert matcher.push("xabbc") == ("x", "ab")
    assert matcher.push("more") == ("", "ab")


def test_an_exponential_pattern_is_linear_here() -> None:
    matcher = RegexMatcher(["(a|aa)+b", "((a*)*)*b"])
    text = "a" * 3000
    for char in text:
        assert matcher.push(char)[1] is None
    assert matcher.push("b")[1] is not None
    assert matcher.matched_text == text + "b"


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "[",
        "[b-a]",
        "*",
        "a**",
        "a{2",
        "a{,}",
        "a{3,2}",
        "a{5000}",
        "\\",
        r"\b",
        r"\1",
        r"\xg0",
        "(?i)a",
        "(?<=a)b",
        "a$",
        "x" * 3000,
        "(" * 30 + "a" + ")" * 30,
        "(a{1000}){1000}",
    ],
)
def test_what_is_broken_or_not_supported_is_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        num_states(pattern)
