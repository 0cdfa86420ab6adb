"""Where continuations depart from their prompt, and what they may be."""

from __future__ import annotations

import numpy as np
import pytest

from banyan.managers.continuations import continued, departure
from banyan.managers.errors import RequestError


@pytest.mark.parametrize(
    ("prompt", "items", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3, 4], [1, 2, 3, 5]], 3),
        ([1, 2, 3], [[1, 2, 3, 4], [1, 2, 9]], 2),  # the border moved in one of them
        ([1, 2, 3], [[1, 7]], 1),
        ([1, 2, 3], [[9, 2, 3]], 0),
        ([1, 2, 3], [[1, 2, 3]], 2),  # nothing was added: its last token counts as its own
        ([1, 2, 3], [[1, 2]], 1),
    ],
)
def test_departure(prompt: list[int], items: list[list[int]], expected: int) -> None:
    assert departure(np.array(prompt), [np.array(item) for item in items]) == expected


def test_one_prompt_per_continuation() -> None:
    assert continued(["a"], ["b", ""], single=True, kind=str) == ["ab", "a"]
    assert continued([[1, 2]], [[3], (4, 5)], single=True, kind=(list, tuple)) == [[1, 2, 3], [1, 2, 4, 5]]


@pytest.mark.parametrize(
    ("prompts", "continuations", "single", "kind", "message"),
    [
        (["a", "b"], ["c"], False, str, "one prompt"),
        (["a"], [], True, str, "must not be empty"),
        (["a"], [[1]], True, str, "must be texts"),
        ([[1]], ["a"], True, (list, tuple), "lists of token ids"),
    ],
)
def test_what_is_refused(prompts: list[object], continuations: list[object], single: bool, kind: type, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        continued(prompts, continuations, single=single, kind=kind)
    assert caught.value.param == "continuations"
