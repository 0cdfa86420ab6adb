"""OpenAI: any server with OpenAI's interface, through the ``openai`` package."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import msgspec

from ..chat_template import TEMPLATES, ChatTemplate
from ..choices import ChoicesDecision, ChoicesSamplingMethod, Entry, decide, departure
from ..errors import BackendError, require_package
from ..ir import SamplingParams
from ..transcript import Prompt
from .base import Backend, Completion, asks

# parameters that only some servers take, and how: dialect -> (field of the body, or a function of the value)
EXTRA: Mapping[str, Mapping[str, str]] = {
    "openai": {},
    "sglang": {
        name: name
        for name in ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "stop_regex", "regex", "ebnf")
    }
    | {"min_new_tokens": "min_tokens"},
    "vllm": {name: name for name in ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")}
    | {"min_new_tokens": "min_tokens", "regex": "structured_outputs.regex", "ebnf": "structured_outputs.grammar"},
}
LOCAL = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "stop_regex", "regex", "ebnf", "min_new_tokens")
NEVER = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
PLAIN = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "n")


class OpenAI(Backend):
    """model_name on OpenAI, or on the server that base_url names (an argument for the client, like api_key).

    is_chat_model: chat completions or completions; None: chat, unless it is OpenAI's own instruct model. dialect: which parameters
    beyond OpenAI's the server takes: "openai" (none), "sglang" (Banyan too) or "vllm". is_azure: the package's Azure client.
    ``token_usage`` counts what was used.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *args: Any,
        dialect: str = "openai",
        **kwargs: Any,
    ) -> None:
        if dialect not in EXTRA:
            raise ValueError(f"dialect must be one of {', '.join(EXTRA)}, got {dialect!r}")
        package = require_package("openai", "openai")
        self.name = f"the OpenAI-style model {model_name}"
        self.model_name = model_name
        self.is_chat_model = is_chat_model if is_chat_model is not None else "gpt-3.5-turbo-instruct" not in model_name
        self.wants_speculation = True
        self.client = (package.AzureOpenAI if is_azure else package.OpenAI)(*args, **kwargs)
        self.token_usage = {"prompt_tokens": 0, "completion_tokens": 0}
        self._failure: type[Exception] = package.OpenAIError
        self._template = chat_template or TEMPLATES["default"]
        self._dialect = dialect

    def unsupported(self) -> Mapping[str, str]:
        """By the kind of model and the dialect."""
        known = dict(super().unsupported())
        known |= {name: "OpenAI's interface has no such parameter" for name in LOCAL if name not in EXTRA[self._dialect]}
        known |= dict.fromkeys(NEVER, "OpenAI's interface gives no such log-probabilities")
        if self.is_chat_model:
            known["select"] = "a chat interface gives no log-probabilities of a prompt"
        else:
            known["image"] = "a completion interface takes no images"
            if self._dialect == "openai":
                known["json_schema"] = "a completion interface takes no response format"
        return known

    def get_model_name(self) -> str:
        """As given."""
        return self.model_name

    def get_chat_template(self) -> ChatTemplate:
        """As given, for the text; a chat model is sent messages."""
        return self._template

    def generate(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """One call."""
        answer = self._call(prompt, params)
        meta = self._usage(answer.usage)
        texts = [(c.message.content if self.is_chat_model else c.text) or "" for c in answer.choices]
        reasons = [choice.finish_reason for choice in answer.choices]
        return [
            Completion(text, {**meta, "id": answer.id, "finish_reason": {"type": reason}})
            for text, reason in zip(texts, reasons, strict=True)
        ]

    def generate_stream(self, prompt: Prompt, params: SamplingParams) -> Generator[Completion]:
        """One call, in pieces; the usage comes with the last."""
        meta: dict[str, Any] = {}
        try:
            for chunk in self._call(prompt, params, stream=True, stream_options={"include_usage": True}):
                if chunk.usage is not None:
                    meta = {**meta, **self._usage(chunk.usage)}
                    yield Completion("", meta)
                for choice in chunk.choices:
                    if choice.finish_reason is not None:
                        meta = {**meta, "id": chunk.id, "finish_reason": {"type": choice.finish_reason}}
                    yield Completion((choice.delta.content if self.is_chat_model else choice.text) or "", meta)
        except self._failure as error:
            raise _as_backend_error(error) from error

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesSamplingMethod) -> ChoicesDecision:
        """By echoed log-probabilities of prompt + choice: one call for the prompt and all choices.

        Tokens are compared by their text. A method that needs unconditional log-probabilities costs a second call.
        """
        if not prompt.text:
            raise BackendError("select needs text before it: the first token of a text has no probability")
        metas: list[dict[str, Any]] = []
        first, *wholes = self._echo([prompt.text, *[prompt.text + choice for choice in choices]], metas)
        at = departure([entry[2] for entry in first], [[entry[2] for entry in whole] for whole in wholes])
        scored = [whole[at:] for whole in wholes]
        if any(entry[0] is None for entries in scored for entry in entries):
            raise BackendError("select: a token of a choice has no log-probability")
        plain = None
        if method.requires_unconditional_logprobs:
            plain = self._echo(["".join(entry[2] for entry in entries) for entries in scored], metas)
        decision = decide(method, choices, scored, unconditional=plain)
        return ChoicesDecision(decision.decision, {**decision.meta_info, "requests": metas})

    def _echo(self, texts: list[str], metas: list[dict[str, Any]]) -> list[list[Entry]]:
        """[log-probability, None, text] of each token of each text. One token must be asked for, and is dropped."""
        try:
            answer = self.client.completions.create(
                model=self.model_name, prompt=texts, max_tokens=1, temperature=0, echo=True, logprobs=1
            )
        except self._failure as error:
            raise _as_backend_error(error) from error
        metas.append(self._usage(answer.usage))
        found = []
        for choice, text in zip(answer.choices, texts, strict=True):
            entries: list[Entry] = []
            length = 0
            for token, value in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True):
                if length >= len(text):
                    break
                entries.append([value, None, token])
                length += len(token)
            found.append(entries)
        return found

    def _call(self, prompt: Prompt, params: SamplingParams, **more: Any) -> Any:
        body = self._body(params)
        try:
            if not self.is_chat_model:
                return self.client.completions.create(model=self.model_name, prompt=prompt.text, **body, **more)
            return self.client.chat.completions.create(
                model=self.model_name, messages=conversation(prompt, self.name), **body, **more
            )
        except self._failure as error:
            raise _as_backend_error(error) from error

    def _body(self, params: SamplingParams) -> dict[str, Any]:
        body = {name: value for name in PLAIN if (value := getattr(params, name)) is not None}
        if params.max_new_tokens is not None:
            body["max_completion_tokens" if self.is_chat_model and self._dialect == "openai" else "max_tokens"] = (
                params.max_new_tokens
            )
        if params.stops():
            body["stop"] = params.stops()
        if params.json_schema:
            schema = {"name": "answer", "schema": msgspec.json.decode(params.json_schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        extra: dict[str, Any] = {}
        for name, field in EXTRA[self._dialect].items():
            if asks(name, getattr(params, name)):
                outer, _, inner = field.rpartition(".")
                (extra.setdefault(outer, {}) if outer else extra)[inner] = getattr(params, name)
        return {**body, **({"extra_body": extra} if extra else {})}

    def _usage(self, usage: Any) -> dict[str, Any]:
        if usage is None:
            return {}
        details = getattr(usage, "prompt_tokens_details", None)
        self.token_usage["prompt_tokens"] += usage.prompt_tokens
        self.token_usage["completion_tokens"] += usage.completion_tokens or 0
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens or 0,
            "cached_tokens": getattr(details, "cached_tokens", None) or 0,
        }


def conversation(prompt: Prompt, name: str) -> list[dict[str, Any]]:
    """The messages of a prompt whose completion is the assistant's next turn. Raises BackendError where it is not."""
    if prompt.role != "assistant":
        raise BackendError(f"{name} is a chat model: a gen must stand in an assistant's turn")
    if prompt.messages[-1]["content"]:
        raise BackendError(f"{name} is a chat model: a gen must be the first of an assistant's turn; see num_api_spec_tokens")
    return prompt.messages[:-1]


def _as_backend_error(error: Exception) -> BackendError:
    return BackendError(str(error), status=getattr(error, "status_code", None))
