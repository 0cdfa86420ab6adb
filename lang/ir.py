"""The steps of a program as values: what ``gen``, ``select``, ``user`` ... return and ``s +=`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .choices import ChoicesSamplingMethod

Role = Literal["system", "user", "assistant"]

REGEX_OF_DTYPE = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "bool": r"(True|False)",
    "str": r"\"[\w\d\s]*\"",
}
STOPS_OF_DTYPE = {"int": (" ", "\n"), "float": (" ", "\n")}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one gen samples. None means: as the run says; what the run leaves None is the backend's default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    seed: int | None = None

    def over(self, base: SamplingParams) -> SamplingParams:
        """These values, and the base's where there is none."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(base, **{name: value for name, value in given.items() if value is not None})

    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


class Expr:
    """A step, or several. ``+`` makes a list of them, with strings too."""

    def __add__(self, other: object) -> ExprList:
        return ExprList(parts_of(self) + parts_of(other))

    def __radd__(self, other: object) -> ExprList:
        return ExprList(parts_of(other) + parts_of(self))


@dataclass(frozen=True)
class Text(Expr):
    """Text as it is."""

    value: str


@dataclass(frozen=True)
class ExprList(Expr):
    """Steps in order."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Gen(Expr):
    """A completion, under a name if it has one. reasoning: the kind of model whose thinking is split off."""

    name: str | None
    params: SamplingParams
    reasoning: str | None = None

    def __str__(self) -> str:
        return "gen" if self.name is None else f"gen {self.name!r}"


@dataclass(frozen=True)
class Select(Expr):
    """The likeliest of some choices."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod
    temperature: float = 0.0

    def __str__(self) -> str:
        return "select" if self.name is None else f"select {self.name!r}"


@dataclass(frozen=True)
class RoleBegin(Expr):
    """Opens a turn of a conversation."""

    role: Role


@dataclass(frozen=True)
class RoleEnd(Expr):
    """Closes the turn."""

    role: Role


@dataclass(frozen=True)
class Image(Expr):
    """A picture: a path, a URL, a data URI, bytes, or an object with PIL's ``save``."""

    source: Any


@dataclass(frozen=True)
class Video(Expr):
    """Frames of a film."""

    path: str
    num_frames: int


@dataclass(frozen=True)
class ScopeBegin(Expr):
    """From here on the text goes into a variable as well."""

    name: str


@dataclass(frozen=True)
class ScopeEnd(Expr):
    """The variable is complete."""

    name: str


def parts_of(value: object) -> tuple[Expr, ...]:
    """The steps that ``s += value`` takes, flat. Raises ValueError for None, TypeError for what is no step."""
    if value is None:
        raise ValueError("None was appended to a program's state; append a string or a step")
    if isinstance(value, str):
        return (Text(value),)
    if isinstance(value, ExprList):
        return tuple(part for each in value.parts for part in parts_of(each))
    if isinstance(value, Expr):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(part for each in value for part in parts_of(each))
    raise TypeError(f"a {type(value).__name__} was appended to a program's state; append a string or a step")


def with_reasoning(expr: object, kind: str) -> ExprList:
    """The steps with each gen splitting off the thinking of that kind of model."""
    parts = parts_of(expr)
    return ExprList(tuple(replace(part, reasoning=kind) if isinstance(part, Gen) else part for part in parts))
