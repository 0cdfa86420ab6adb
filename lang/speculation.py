"""num_api_spec_tokens: fewer calls to backends that bill or wait per call, by asking for more than one gen at once.

A completion model is asked for more text than a gen needs, without stops; later gens are cut from what it wrote, as long as the
program's fixed text agrees with it. A chat model is asked once per assistant turn, and its answer is matched against the fixed text
between the turn's gens.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .backend.base import Backend, Completion
from .errors import LangError
from .ir import Gen, SamplingParams
from .transcript import Prompt, Transcript

if TYPE_CHECKING:
    from .interpreter import Setting

Resolved = tuple[str, list[tuple[str, str]], dict[str, Any]]


class Speculation:
    """What of it concerns a state; this base puts nothing off and guesses nothing."""

    def __init__(self, backend: Backend, num_tokens: int) -> None:
        self._backend = backend
        self._num_tokens = num_tokens

    @staticmethod
    def of(setting: Setting) -> Speculation | None:
        """None where the program asks for none, or the backend's cache makes it pointless."""
        if setting.num_spec_tokens is None or not setting.backend.wants_speculation:
            return None
        kind = _OfChat if setting.backend.is_chat_model else _OfText
        return kind(setting.backend, setting.num_spec_tokens)

    @property
    def is_open(self) -> bool:
        """Gens were put off."""
        return False

    def append(self, text: str) -> None:
        """The program adds fixed text."""

    def put_off(self, gen: Gen, params: SamplingParams, transcript: Transcript) -> bool:
        """Whether this gen waits for the end of its turn."""
        return False

    def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """A gen that was not put off."""
        return self._backend.generate(prompt, params)

    def resolve(self) -> Resolved:
        """All that was put off: the state's whole text, the variables, the call's meta_info."""
        raise LangError("nothing was put off")


class _OfText(Speculation):
    """Keeps what was written beyond the last gen."""

    def __init__(self, backend: Backend, num_tokens: int) -> None:
        super().__init__(backend, num_tokens)
        self._ahead = ""
        self._meta: dict[str, Any] = {}

    def append(self, text: str) -> None:
        self._ahead = self._ahead[len(text) :] if self._ahead.startswith(text) else ""

    def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        stops = params.stops()
        if not stops or (params.n or 1) > 1:  # only a stop says where a gen ends
            self._ahead = ""
            return self._backend.generate(prompt, params)
        end = _first(self._ahead, stops)
        if end is None:
            longer = replace(params, stop=None, max_new_tokens=max(params.max_new_tokens or 0, self._num_tokens))
            (done,) = self._backend.generate(prompt, longer)
            self._ahead, self._meta = done.text, done.meta_info
            end = _first(self._ahead, stops)
            end = len(self._ahead) if end is None else end
        text, self._ahead = self._ahead[:end], self._ahead[end:]
        return [Completion(text, self._meta)]


class _OfChat(Speculation):
    """Collects the gens and the fixed text of one assistant turn."""

    def __init__(self, backend: Backend, num_tokens: int) -> None:
        super().__init__(backend, num_tokens)
        self._prompt: Prompt | None = None
        self._pieces: list[str | tuple[Gen, SamplingParams]] = []

    @property
    def is_open(self) -> bool:
        return self._prompt is not None

    def append(self, text: str) -> None:
        if self._prompt is not None:
            self._pieces.append(text)

    def put_off(self, gen: Gen, params: SamplingParams, transcript: Transcript) -> bool:
        if transcript.role != "assistant" or gen.reasoning is not None or (params.n or 1) > 1:
            return False
        if self._prompt is None:
            self._prompt = transcript.prompt()
        self._pieces.append((gen, params))
        return True

    def resolve(self) -> Resolved:
        prompt, pieces = self._prompt, self._pieces
        self._prompt, self._pieces = None, []
        gens = [piece for piece in pieces if not isinstance(piece, str)]
        if prompt is None or not gens:
            raise LangError("nothing was put off")
        params = gens[0][1]
        if len(pieces) > 1:
            wanted = sum(each.max_new_tokens or 0 for _, each in gens)
            params = replace(params, stop=None, max_new_tokens=max(wanted, self._num_tokens))
        (done,) = self._backend.generate(prompt, params)
        return self._matched(prompt, pieces, done)

    @staticmethod
    def _matched(prompt: Prompt, pieces: list[str | tuple[Gen, SamplingParams]], done: Completion) -> Resolved:
        last = len(pieces) - 1
        groups = ["(.*)" if index == last else "(.*?)" for index in range(len(pieces))]
        pattern = "".join(re.escape(piece) if isinstance(piece, str) else groups[i] for i, piece in enumerate(pieces))
        found = re.match(pattern, done.text, re.DOTALL)
        if found is None:
            raise LangError(f"the answer does not follow the fixed text of the turn: {done.text[:200]!r}")
        text, values, number = prompt.text, [], 0
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
                continue
            number += 1
            value = found.group(number)
            value = value[: _first(value, piece[1].stops())]
            text += value
            if piece[0].name is not None:
                values.append((piece[0].name, value))
        return text, values, done.meta_info


def _first(text: str, stops: list[str]) -> int | None:
    """Where the first of the stops begins."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(places) if places else None
