"""How select decides among its choices, from the log-probabilities of their tokens.

What is scored: let P be the tokens of the prompt and F_c those of prompt + choice, tokenised together. k is the first position at
which any F_c departs from P, so F_c[:k] is the same for all choices, and each choice's tokens are F_c[k:]. Usually k = len(P);
it is less where a choice changes how the end of the prompt is tokenised. Every entry a method sees is a number: nothing before k
counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Entry = Sequence[Any]  # [log-probability, token id, text or None]


@dataclass(frozen=True)
class ChoicesDecision:
    """The choice that was made, and the numbers behind it."""

    decision: str
    meta_info: dict[str, Any]


class ChoicesSamplingMethod(ABC):
    """A rule. The first of equal choices wins."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether it needs the log-probabilities of the choices' tokens without the prompt."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Entry]],
        output_token_logprobs: list[list[Entry]],
        unconditional_token_logprobs: list[list[Entry]] | None = None,
    ) -> ChoicesDecision:
        """Decide. normalized_prompt_logprobs: the mean over each choice's own tokens; input_token_logprobs: these tokens."""


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The largest mean log-probability per token."""

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Entry]],
        output_token_logprobs: list[list[Entry]],
        unconditional_token_logprobs: list[list[Entry]] | None = None,
    ) -> ChoicesDecision:
        """Decide."""
        best = _argmax(normalized_prompt_logprobs)
        return ChoicesDecision(choices[best], _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs))


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token by token, keep the choices with the likeliest next token. A choice that has ended counts with its own mean.

    Choices that begin with the same tokens have the same value there, whatever rounding did to them in their rows of a batch.
    """

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Entry]],
        output_token_logprobs: list[list[Entry]],
        unconditional_token_logprobs: list[list[Entry]] | None = None,
    ) -> ChoicesDecision:
        """Decide."""
        length = max(len(entries) for entries in input_token_logprobs)
        matrix = []
        known: dict[tuple[Any, ...], float] = {}
        for entries in input_token_logprobs:
            path = tuple(entry[2] if entry[1] is None else entry[1] for entry in entries)
            values = [known.setdefault(path[: rank + 1], float(entry[0])) for rank, entry in enumerate(entries)]
            matrix.append(values + [_mean(values)] * (length - len(values)))
        left = list(range(len(choices)))
        for position in range(length):
            best = max(matrix[row][position] for row in left)
            left = [row for row in left if matrix[row][position] == best]
            if len(left) == 1:
                break
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        return ChoicesDecision(choices[left[0]], {**meta, "greedy_logprob_matrix": matrix})


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The largest mean of log p(token | prompt, before) - log p(token | before, without the prompt).

    The first token has nothing before it without the prompt, so its unconditional part counts as 0, for all choices alike.
    """

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """It does."""
        return True

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Entry]],
        output_token_logprobs: list[list[Entry]],
        unconditional_token_logprobs: list[list[Entry]] | None = None,
    ) -> ChoicesDecision:
        """Decide."""
        if unconditional_token_logprobs is None:
            raise ValueError("unconditional log-probabilities are required for this method")
        scores = []
        for entries, plain in zip(input_token_logprobs, unconditional_token_logprobs, strict=True):
            gains = [float(a[0]) - _number(b[0]) for a, b in zip(entries, plain, strict=True)]
            scores.append(_mean(gains))
        meta = _meta(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        meta["unconditional_token_logprobs"] = unconditional_token_logprobs
        meta["normalized_unconditional_prompt_logprobs"] = scores
        return ChoicesDecision(choices[_argmax(scores)], meta)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def decide(
    method: ChoicesSamplingMethod,
    choices: Sequence[str],
    scored: list[list[Entry]],
    *,
    outputs: list[list[Entry]] | None = None,
    unconditional: list[list[Entry]] | None = None,
) -> ChoicesDecision:
    """Apply a method to the scored tokens of each choice."""
    return method(
        choices=list(choices),
        normalized_prompt_logprobs=[_mean([float(entry[0]) for entry in entries]) for entries in scored],
        input_token_logprobs=scored,
        output_token_logprobs=[[] for _ in choices] if outputs is None else outputs,
        unconditional_token_logprobs=unconditional,
    )


def departure(prompt: Sequence[object], wholes: Sequence[Sequence[object]]) -> int:
    """The first position at which any of the wholes departs from the prompt; each whole has at least one entry from there on."""
    first = len(prompt)
    for whole in wholes:
        limit = min(first, len(whole))
        first = next((i for i in range(limit) if whole[i] != prompt[i]), limit)
    return max(0, min([first, *(len(whole) - 1 for whole in wholes)]))


def _meta(means: list[float], inputs: list[list[Entry]], outputs: list[list[Entry]]) -> dict[str, Any]:
    return {"normalized_prompt_logprobs": means, "input_token_logprobs": inputs, "output_token_logprobs": outputs}


def _number(value: float | None) -> float:
    return 0.0 if value is None else float(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
