"""select on a real model equals an exhaustive log-likelihood computation by transformers in float32."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from reference import load_reference

import banyan as bn
from banyan.lang.backend.engine import EngineBackend
from banyan.lang.transcript import Prompt
from banyan.managers.tokenizer import Tokenizer
from banyan.srt.model_source import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

TOLERANCE = 2e-3
WORDS = [
    "the",
    "a",
    "river",
    "Paris",
    "Rome",
    "is",
    "of",
    "capital",
    "France",
    "answer",
    "yes",
    "no",
    "cat",
    "12",
    "3",
    "ing",
    "er",
    "un",
    "believ",
    "able",
    ",",
    ".",
    ":",
    "(",
    "don't",
    "café",
    "世界",
    "😀",
]
METHODS = (bn.token_length_normalized, bn.greedy_token_selection, bn.unconditional_likelihood_normalized)


def cases(count: int) -> list[tuple[str, list[str]]]:
    """Prompts that end in a word, a part of one or a space; choices that begin with a space, a part of a word or a line break."""
    draw = random.Random(7)

    def text(length: int) -> str:
        return "".join(draw.choice(WORDS) + draw.choice([" ", " ", ""]) for _ in range(length))

    found = []
    while len(found) < count:
        choices = {draw.choice(["", " ", "\n"]) + text(draw.randint(1, 4)) for _ in range(draw.randint(2, 5))}
        if len(choices) > 1:
            found.append((text(draw.randint(2, 12)), sorted(choices)))
    return found


class Exhaustive:
    """log p of each token of each choice, by one forward pass over each whole text, without any cache."""

    def __init__(self, path: str) -> None:
        self.model = load_reference(path)
        self.tokenizer = Tokenizer.load(path)

    @torch.inference_mode()
    def logprobs(self, rows: list[list[int]], at: int) -> list[list[float]]:
        """Of each row from position ``at`` on; 0 for a first token. Rows are padded at their ends, where no real token looks."""
        length = max(map(len, rows))
        logits = self.model(torch.tensor([row + [0] * (length - len(row)) for row in rows])).logits.float()
        values = torch.log_softmax(logits, dim=-1)
        return [
            [0.0 if i == 0 else float(values[number, i - 1, row[i]]) for i in range(at, len(row))]
            for number, row in enumerate(rows)
        ]

    def scores(self, text: str, choices: list[str]) -> tuple[list[list[float]], list[list[int]], int]:
        prompt = self.tokenizer.encode(text)
        wholes = [self.tokenizer.encode(text + choice) for choice in choices]
        at = 0
        while at < len(prompt) and all(at < len(whole) - 1 and whole[at] == prompt[at] for whole in wholes):
            at += 1
        return self.logprobs(wholes, at), wholes, at

    def values(self, method: Any, rows: list[list[float]], own: list[list[int]]) -> list[float]:
        """A number per choice, the largest of which wins."""
        if method is bn.token_length_normalized:
            return [sum(row) / len(row) for row in rows]
        plain = self.logprobs(own, 0)
        return [sum(a - b for a, b in zip(*pair, strict=True)) / len(pair[0]) for pair in zip(rows, plain, strict=True)]


def greedy_is_right(rows: list[list[float]], chosen: int) -> bool:
    """No choice that was as likely as the chosen one up to a position is clearly likelier there."""
    length = max(map(len, rows))
    padded = [row + [sum(row) / len(row)] * (length - len(row)) for row in rows]
    left = list(range(len(rows)))
    for position in range(length):
        best = max(padded[i][position] for i in left)
        if padded[chosen][position] < best - TOLERANCE:
            return False
        left = [i for i in left if padded[i][position] >= best - TOLERANCE]
    return True


def test_random_cases() -> None:
    number_of_cases = int(os.environ.get("BANYAN_SELECT_CASES", "10"))  # 50 take some minutes
    path = resolve_model("smollm2").path
    truth = Exhaustive(path)
    num_shifted = 0
    with bn.Engine(model_path=path, dtype="float32") as engine:
        backend = EngineBackend(engine)
        for number, (text, choices) in enumerate(cases(number_of_cases)):
            rows, wholes, at = truth.scores(text, choices)
            num_shifted += at < len(truth.tokenizer.encode(text))
            method = METHODS[number % len(METHODS)]
            decision = backend.select(Prompt(text, [], None, ()), choices, method)
            scored = decision.meta_info["input_token_logprobs"]
            assert [[entry[1] for entry in row] for row in scored] == [whole[at:] for whole in wholes]
            for row, expected in zip(scored, rows, strict=True):
                assert [entry[0] for entry in row] == pytest.approx(expected, abs=TOLERANCE)
            chosen = choices.index(decision.decision)
            if method is bn.greedy_token_selection:
                assert greedy_is_right(rows, chosen)
            else:
                values = truth.values(method, rows, [whole[at:] for whole in wholes])
                assert values[chosen] >= max(values) - TOLERANCE
    assert num_shifted >= number_of_cases // 5, "the cases must reach retokenised borders"
