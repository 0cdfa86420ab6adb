"""Anthropic: Claude, through the ``anthropic`` package."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from ..chat_template import TEMPLATES, ChatTemplate
from ..errors import BackendError, require_package
from ..ir import SamplingParams
from ..transcript import Prompt
from .base import Backend, Completion

LOCAL = (
    "n",
    "min_new_tokens",
    "stop_token_ids",
    "stop_regex",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "regex",
    "json_schema",
    "ebnf",
    "seed",
)


class Anthropic(Backend):
    """model_name, on Anthropic or on the server that base_url names. Other arguments are the client's."""

    is_chat_model = True

    def __init__(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        package = require_package("anthropic", "anthropic")
        self.name = f"the Anthropic model {model_name}"
        self.model_name = model_name
        self.wants_speculation = True
        self.client = package.Anthropic(*args, **kwargs)
        self._failure: type[Exception] = package.AnthropicError

    def unsupported(self) -> Mapping[str, str]:
        """Everything beyond text, stops, temperature, top_p and top_k."""
        known = dict(super().unsupported())
        known |= dict.fromkeys(LOCAL, "Anthropic's interface has no such parameter")
        known["select"] = "Anthropic's interface gives no log-probabilities"
        known["image"] = "pictures are not sent to Anthropic's interface yet"
        return known

    def get_model_name(self) -> str:
        """As given."""
        return self.model_name

    def get_chat_template(self) -> ChatTemplate:
        """For the text; the model is sent messages."""
        return TEMPLATES["claude"]

    def generate(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """One call."""
        try:
            answer = self.client.messages.create(**self._body(prompt, params))
        except self._failure as error:
            raise _as_backend_error(error) from error
        text = "".join(block.text for block in answer.content if block.type == "text")
        return [Completion(text, _meta(answer))]

    def generate_stream(self, prompt: Prompt, params: SamplingParams) -> Generator[Completion]:
        """One call, in pieces; the counts come with the last."""
        try:
            with self.client.messages.stream(**self._body(prompt, params)) as stream:
                for text in stream.text_stream:
                    yield Completion(text, {})
                yield Completion("", _meta(stream.get_final_message()))
        except self._failure as error:
            raise _as_backend_error(error) from error

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        if prompt.role != "assistant":
            raise BackendError(f"{self.name} is a chat model: a gen must stand in an assistant's turn")
        messages = prompt.messages if prompt.messages[-1]["content"] else prompt.messages[:-1]
        system = "\n".join(message["content"] for message in messages if message["role"] == "system")
        body: dict[str, Any] = {
            "model": self.model_name,
            "max_tokens": params.max_new_tokens or 128,
            "messages": [message for message in messages if message["role"] != "system"],
        }
        given = {"temperature": params.temperature, "top_p": params.top_p, "stop_sequences": params.stops(), "system": system}
        body |= {name: value for name, value in given.items() if value not in (None, [], "", 1.0)}
        if params.top_k is not None and params.top_k > 0:
            body["top_k"] = params.top_k
        return body


def _meta(answer: Any) -> dict[str, Any]:
    usage = answer.usage
    cached = getattr(usage, "cache_read_input_tokens", None) or 0
    return {
        "id": answer.id,
        "finish_reason": {"type": answer.stop_reason},
        "prompt_tokens": usage.input_tokens + cached,
        "cached_tokens": cached,
        "completion_tokens": usage.output_tokens,
    }


def _as_backend_error(error: Exception) -> BackendError:
    return BackendError(str(error), status=getattr(error, "status_code", None))
