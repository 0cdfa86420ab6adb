"""Backend: what a program's steps are sent to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..chat_template import ChatTemplate
from ..choices import ChoicesDecision, ChoicesSamplingMethod
from ..errors import UnsupportedError
from ..ir import SamplingParams
from ..transcript import Prompt

# Values of parameters that ask for nothing, so that a backend without the parameter can run them.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_new_tokens": (0,),
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "ignore_eos": (False,),
    "return_logprob": (False,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "return_text_in_logprobs": (False,),
}


@dataclass(frozen=True)
class Completion:
    """A completion, or what is new of one in a stream; meta_info is always of the whole."""

    text: str
    meta_info: dict[str, Any]


class Backend(ABC):
    """A subclass says in ``unsupported`` what it cannot do and why: names of SamplingParams, "select", "image", "video", "text"
    (a gen outside of an assistant's turn). Its methods are called from many threads at once. They raise BackendError."""

    name: str = "backend"
    is_chat_model: bool = False  # gets messages, so a completion ends its turn
    has_prefix_cache: bool = False  # so that it is worth telling it what many runs will begin with
    wants_speculation: bool = False  # a call costs more than tokens, so num_api_spec_tokens helps

    def unsupported(self) -> Mapping[str, str]:
        """feature -> the reason why it cannot be had."""
        return {"video": "no frames can be sent"}

    def check(self, feature: str) -> None:
        """Raises UnsupportedError."""
        reason = self.unsupported().get(feature)
        if reason is not None:
            raise UnsupportedError(feature, self.name, reason)

    def check_params(self, params: SamplingParams) -> None:
        """Raises UnsupportedError for the first parameter that asks for something the backend lacks."""
        for feature in self.unsupported():
            if feature in _PARAMS and asks(feature, getattr(params, feature)):
                self.check(feature)

    @abstractmethod
    def get_model_name(self) -> str:
        """What serves the calls."""

    @abstractmethod
    def get_chat_template(self) -> ChatTemplate:
        """What is written between turns. Raises LangError where nobody knows."""

    @abstractmethod
    def generate(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """Complete it params.n times."""

    @abstractmethod
    def generate_stream(self, prompt: Prompt, params: SamplingParams) -> Generator[Completion]:
        """Complete it once; what is new, as it comes."""

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesSamplingMethod) -> ChoicesDecision:
        """Decide among choices."""
        raise UnsupportedError("select", self.name, "it gives no log-probabilities of a prompt")

    def cache_prefix(self, text: str, images: Sequence[Any] = ()) -> dict[str, Any] | None:
        """Have the text in the cache before many calls that begin with it; the meta_info of the call, None if none was made."""
        return None

    def shares_calls(self) -> bool:
        """What calls that are under way at once have in common is computed once, without anybody's asking for it."""
        return False

    def prepare_forks(self, text: str, images: Sequence[Any] = ()) -> dict[str, Any] | None:
        """Several calls that begin with the text are about to be made at once; the meta_info of a call for them, None if none was
        made."""
        return None if self.shares_calls() else self.cache_prefix(text, images)

    def flush_cache(self) -> bool:
        """Empty the cache; whether that was done."""
        return False

    def get_server_info(self) -> dict[str, Any] | None:
        """What the server tells of itself."""
        return None

    def shutdown(self) -> None:  # noqa: B027  most hold nothing
        """Let go of what the backend holds."""


_PARAMS = {field.name for field in fields(SamplingParams)}


def asks(name: str, value: Any) -> bool:
    """Whether a parameter asks for anything."""
    if value is None or value in ((), [], ""):
        return False
    return value not in NEUTRAL.get(name, ())
