"""Splitting a model's thinking from its answer."""

from __future__ import annotations

# kind of model: (opening mark, closing mark, whether the text begins inside the thinking without an opening mark)
MARKS: dict[str, tuple[str, str, bool]] = {
    "deepseek-r1": ("<think>", "</think>", True),
    "deepseek-v3": ("<think>", "</think>", False),
    "qwen3": ("<think>", "</think>", False),
    "qwen3-thinking": ("<think>", "</think>", True),
    "glm45": ("<think>", "</think>", False),
    "kimi": ("◁think▷", "◁/think▷", False),
    "think": ("<think>", "</think>", False),
}


def check_kind(kind: str | None) -> str:
    """A known kind; None is "think". Raises ValueError that lists them."""
    if kind is None:
        return "think"
    if kind not in MARKS:
        raise ValueError(f"separate_reasoning: unknown model_type {kind!r}; known are {', '.join(MARKS)}")
    return kind


def split_reasoning(text: str, kind: str) -> tuple[str, str]:
    """(thinking, answer), both without the marks and the blanks around them. A thought that never ends has no answer."""
    begin, end, inside = MARKS[kind]
    stripped = text.lstrip()
    if stripped.startswith(begin):
        stripped = stripped[len(begin) :]
    elif not (inside or end in stripped):
        return "", text
    thinking, found, answer = stripped.partition(end)
    return thinking.strip(), answer.lstrip() if found else ""
