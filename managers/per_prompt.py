"""Fields of a batch: one value for all prompts, or a list with one per prompt."""

from __future__ import annotations

from typing import TypeVar

from .errors import RequestError

T = TypeVar("T")


def per_prompt(given: T | list[T] | None, num_prompts: int, name: str, default: T) -> list[T]:
    """One value per prompt. Raises RequestError for a list of another length."""
    if not isinstance(given, list):
        return [default if given is None else given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(f"{name} has {len(given)} entries for {num_prompts} prompts.", param=name)
    return given
