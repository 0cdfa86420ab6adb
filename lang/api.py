"""The names a program is written with."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from ..managers.reasoning.parser import DEFAULT, reasoning_names
from . import ir
from .choices import (
    ChoicesSamplingMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from .global_config import global_config

if TYPE_CHECKING:
    from .program import Function

__all__ = [
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

DTYPES = {int: "int", float: "float", bool: "bool", str: "str"}
Strings = str | Sequence[str] | None


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> Function: ...
@overload
def function(func: None = None, num_api_spec_tokens: int | None = None) -> Callable[[Callable[..., Any]], Function]: ...
def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is ``s``; ``async def`` makes an async program.

    num_api_spec_tokens: how far a call to somebody's API may run ahead, see docs/language.md; it changes nothing on a server with
    a prefix cache.
    """
    from .program import Function

    if func is not None:
        return Function(func, num_api_spec_tokens)
    return lambda decorated: Function(decorated, num_api_spec_tokens)


def gen(  # noqa: PLR0913, PLR0917  the order is SGLang's; what is new comes last
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Strings = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Strings = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: str | None = None,
    *,
    ebnf: str | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
) -> ir.Gen | ir.Select:
    """A completion of the text so far, appended to it and kept as ``s[name]``.

    What is None is as ``run`` says. n > 1: the variable is a list, the text goes on with its first element. choices makes it a
    ``select``. dtype int, float, bool or str constrains the text by a regular expression. Raises ValueError for a regex that does
    not compile, or more than one of regex, json_schema and ebnf.
    """
    if choices is not None:
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method or token_length_normalized)
    kind = _dtype(dtype)
    if kind is not None:
        if regex is not None:
            warnings.warn("gen: both dtype and regex are given; dtype is used", stacklevel=2)
        regex = ir.REGEX_OF_DTYPE[kind]
        stop = [*ir.SamplingParams(stop=stop).stops(), *ir.STOPS_OF_DTYPE.get(kind, ())]
    if sum(bool(each) for each in (regex, json_schema, ebnf)) > 1:
        raise ValueError("gen: only one of regex, json_schema and ebnf can be given")
    if regex is not None:
        _compiles(regex)
    params = ir.SamplingParams(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_regex,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        regex=regex,
        json_schema=json_schema,
        ebnf=ebnf,
        seed=seed,
    )
    return ir.Gen(name, params)


def gen_int(*args: Any, **params: Any) -> ir.Gen | ir.Select:
    """``gen`` of an integer: gen's parameters in its order, without min_tokens and from dtype on."""
    return gen(dtype=int, **_without_min_tokens("gen_int", args, params))


def gen_string(*args: Any, **params: Any) -> ir.Gen | ir.Select:
    """``gen`` of a quoted string: gen's parameters in its order, without min_tokens and from dtype on."""
    return gen(dtype=str, **_without_min_tokens("gen_string", args, params))


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
) -> ir.Select:
    """The likeliest of the choices, appended to the text and kept as ``s[name]``. How they are scored: lang/choices.py.

    Raises ValueError for no choices, an empty one, or a temperature that is not 0: a choice is a decision, not a draw.
    """
    if not choices or isinstance(choices, str) or not all(isinstance(each, str) and each for each in choices):
        raise ValueError("select: choices must be a list of non-empty strings")
    if temperature > 1e-5:
        raise ValueError(f"select: temperature must be 0, got {temperature}")
    return ir.Select(name, tuple(choices), choices_method, temperature)


def image(expr: Any) -> ir.Image:
    """A picture: a path, a URL, bytes or a PIL image."""
    return ir.Image(expr)


def video(path: str, num_frames: int) -> ir.Video:
    """Frames of a film. No backend takes them yet: a program with it fails at its start."""
    return ir.Video(path, num_frames)


def separate_reasoning(expr: Any = None, model_type: str | None = None) -> ir.ExprList:
    """The gens inside split the model's thinking off: ``s[name]`` and the text have the answer, ``s[name + "_reasoning_content"]``
    the thinking. These gens do not stream. model_type: how the thinking is marked, None for <think> tags."""
    return ir.with_reasoning([] if expr is None else expr, _reasoning_kind(model_type))


def _reasoning_kind(name: str | None) -> str:
    if name is not None and name not in reasoning_names():
        raise ValueError(f"separate_reasoning: unknown model_type {name!r}; known are {', '.join(reasoning_names())}")
    return name or DEFAULT


def system(expr: Any = None) -> ir.ExprList:
    """A turn of the system."""
    return _turn("system", expr)


def user(expr: Any = None) -> ir.ExprList:
    """A turn of the user."""
    return _turn("user", expr)


def assistant(expr: Any = None) -> ir.ExprList:
    """A turn of the assistant."""
    return _turn("assistant", expr)


def system_begin() -> ir.RoleBegin:
    """Opens the system's turn."""
    return ir.RoleBegin("system")


def system_end() -> ir.RoleEnd:
    """Closes it."""
    return ir.RoleEnd("system")


def user_begin() -> ir.RoleBegin:
    """Opens a turn of the user."""
    return ir.RoleBegin("user")


def user_end() -> ir.RoleEnd:
    """Closes it."""
    return ir.RoleEnd("user")


def assistant_begin() -> ir.RoleBegin:
    """Opens a turn of the assistant."""
    return ir.RoleBegin("assistant")


def assistant_end() -> ir.RoleEnd:
    """Closes it."""
    return ir.RoleEnd("assistant")


def set_default_backend(backend: Any) -> None:
    """What programs run on unless told otherwise: a Backend, an Engine, or a Runtime. None takes it back."""
    from .backend.resolve import as_backend

    global_config.default_backend = None if backend is None else as_backend(backend)


def flush_cache(backend: Any = None) -> bool:
    """Empty the backend's prefix cache; whether that was done. False without a backend."""
    from .backend.resolve import as_backend

    chosen = backend or global_config.default_backend
    return chosen is not None and as_backend(chosen).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """What the backend's server tells of itself. None without a backend."""
    from .backend.resolve import as_backend

    chosen = backend or global_config.default_backend
    return None if chosen is None else as_backend(chosen).get_server_info()


def _turn(role: ir.Role, expr: Any) -> ir.ExprList:
    inner = () if expr is None else ir.parts_of(expr)
    return ir.ExprList((ir.RoleBegin(role), *inner, ir.RoleEnd(role)))


GEN_INT_ORDER = (
    "name",
    "max_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)


def _without_min_tokens(function: str, args: tuple[Any, ...], params: dict[str, Any]) -> dict[str, Any]:
    named = dict(zip(GEN_INT_ORDER, args, strict=False))
    wrong = [name for name in params if name in named or name not in (*GEN_INT_ORDER, "seed", "repetition_penalty")]
    if wrong or len(args) > len(GEN_INT_ORDER):
        raise TypeError(
            f"{function} got too many arguments" if not wrong else f"{function} got an unexpected argument {wrong[0]!r}"
        )
    return {**named, **params}


def _dtype(dtype: type | str | None) -> str | None:
    kind = DTYPES.get(dtype) if isinstance(dtype, type) else dtype
    if dtype is not None and kind not in ir.REGEX_OF_DTYPE:
        raise ValueError(f"gen: dtype must be int, float, bool or str, got {dtype!r}")
    return kind


def _compiles(regex: str) -> None:
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(f"gen: regex {regex!r} does not compile: {error}") from None
