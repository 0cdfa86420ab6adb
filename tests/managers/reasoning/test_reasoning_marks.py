"""The table of thinking marks."""

from __future__ import annotations

from banyan.managers.reasoning.marks import REASONING_MARKS


def test_marks_can_be_told_apart() -> None:
    for name, marks in REASONING_MARKS.items():
        assert marks.start and marks.end and marks.start != marks.end, name
        assert marks.end not in marks.start and marks.start not in marks.end, name


def test_what_a_template_opens_begins_inside() -> None:
    assert REASONING_MARKS["deepseek-r1"].template_opens and not REASONING_MARKS["qwen3"].template_opens
    assert REASONING_MARKS["qwen3"].end == "</think>"
