"""Bodies of the OpenAI routes: the fields that are honoured, typed; those that are not refuse any value but their default.

Fields that no one knows are ignored. A null means the default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from ...managers.errors import RequestError
from ...managers.io_struct import CacheHint
from ...managers.nesting import check_depth
from ...managers.sessions.sessions import SessionParams
from .tool_protocol import MAX_TOOLS, Effort, ReasoningOptions, ToolChoice, ToolSpec

MAX_N = 128
OFF: tuple[Any, ...] = (None, False, [], {})  # values that mean "not wanted" for every field
BRANCH_NAMES = frozenset({"str", "int"})  # pydantic's names for the branches of a union, no part of a path


def _short(value: Any) -> Any:
    """Lets lists of ids through without a look at each item by pydantic: a prompt may have millions."""
    if value == "" or value == []:
        raise ValueError("Prompt cannot be empty")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    kinds = set(map(type, value))
    if kinds == {list}:
        kinds = {type(item) for ids in value for item in ids}
        good = kinds == {int} and all(value)
    else:
        good = kinds in ({str}, {int})
    if not good:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty"
        )
    return value


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}
PROMPT_SCHEMA = {"anyOf": [{"type": "string", "minLength": 1}, _TEXTS, _IDS, {"type": "array", "minItems": 1, "items": _IDS}]}
Prompt = Annotated[Any, BeforeValidator(_short), WithJsonSchema(PROMPT_SCHEMA)]
Stop = str | list[str]


class Body(BaseModel):
    """Strict about types, lenient about unknown names."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}  # name -> values, besides OFF, that change nothing

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Validate a decoded body. Raises RequestError that names the field."""
        for name, harmless in cls.unsupported.items():
            if name in values and not _is_one_of(values[name], (*OFF, *harmless)):
                raise RequestError(f"{name} is not supported.", param=name)
        try:
            return cls.model_validate({name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            raise _named(error) from None


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Equal to one of them, where 0 is not False: ``logprobs: 0`` asks for something."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def _named(error: ValidationError) -> RequestError:
    """The most precise of pydantic's complaints, as one line with the field's path."""
    first = max(error.errors(include_url=False, include_context=False, include_input=False), key=lambda each: len(each["loc"]))
    path = [part for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part not in BRANCH_NAMES)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{name}: {message}" if name else message, param=str(path[0]) if path else None)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class CacheHintBody(BaseModel):
    """How long (from the request's end) and how dearly the prefix cache should keep the prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")

    pin_seconds: float = Field(0.0, ge=0, le=86400)
    priority: int = Field(0, ge=0, le=1000)

    def native(self) -> CacheHint:
        return CacheHint(pin_seconds=self.pin_seconds, priority=self.priority)


class JsonSchemaFormat(Body):
    """The schema of a ResponseFormat. It is always enforced, whatever ``strict`` says."""

    name: str = ""
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's response_format; structural_tag has either structures and triggers, or format."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def grammar(self) -> dict[str, Any]:
        """As native sampling parameters."""
        if self.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if self.type == "json_schema":
            if self.json_schema is None:
                raise RequestError("response_format.json_schema is required for the type json_schema.", param="response_format")
            return {"json_schema": json.dumps(self.json_schema.schema_)}
        if self.type == "structural_tag":
            return {"structural_tag": self.model_dump(include={"type", "structures", "triggers", "format"}, exclude_none=True)}
        return {}


class GenerateBody(Body):
    """What completions and chat have in common. ``unsupported`` names come from OpenAI, SGLang and vLLM."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lora_path": (),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "disagg_prefill_dp_rank": (),
        "return_routed_experts": (),
        "return_sampling_mask": (),
        "prompt_logprobs": (),
        "use_beam_search": (),
        "length_penalty": (1,),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "include_stop_str_in_output": (),
        "return_tokens_as_token_ids": (),
        "truncate_prompt_tokens": (),
    }

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    seed: int | None = None
    stop: Stop = []
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    user: str | None = None
    response_format: ResponseFormat | None = None
    # extensions
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    top_k: int = -1
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    stop_token_ids: list[int] = []
    stop_regex: Stop = []
    allowed_token_ids: list[int] | None = None
    bad_words: Stop = []
    custom_params: dict[str, Any] = {}
    custom_logit_processor: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    rid: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    cache_hint: CacheHintBody | None = None
    priority: int | None = None
    session_id: str | None = None
    session_params: dict[str, Any] | None = None
    routing_key: str | None = None
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    return_token_ids: bool = False
    return_hidden_states: bool | Literal["last"] = False
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    max_thinking_tokens: int | None = Field(None, ge=0)

    def token_limit(self) -> int | None:
        """Most new tokens; None: what the context has room for."""
        raise NotImplementedError

    def sampling_params(self) -> dict[str, Any]:
        """The native sampling parameters. Only what the body set is named, so that server-wide preferences fill the rest."""
        names = (
            "n",
            "stop",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "allowed_token_ids",
            "bad_words",
            "custom_params",
            "json_schema",
            "regex",
            "ebnf",
            "structural_tag",
            "stop_token_ids",
            "stop_regex",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "no_stop_trim",
        )
        params: dict[str, Any] = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        params.update(self.response_format.grammar() if self.response_format else {})
        params["max_new_tokens"] = self.token_limit()
        if self.min_tokens:
            params["min_new_tokens"] = self.min_tokens
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params

    def service(self) -> dict[str, Any]:
        """The other fields of a GenerateInput that completions and chat fill alike."""
        names = ["rid", "stream", "extra_key", "cache_salt", "custom_logit_processor", "priority", "session_id", "routing_key"]
        names += ["timeout", "data_parallel_rank", "routed_dp_rank", "max_thinking_tokens"]
        return {
            **{name: getattr(self, name) for name in names},
            "return_hidden_states": "last" if self.return_hidden_states else False,  # these routes tell no other
            "sampling_params": self.sampling_params(),
            "cache_hint": self.cache_hint.native() if self.cache_hint else None,
            "session_params": SessionParams.parse_optional(self.session_params),
        }

    def wants_usage(self) -> bool:
        """The stream ends with a chunk that has usage and no choices."""
        return self.stream_options is not None and self.stream_options.include_usage

    def wants_running_usage(self) -> bool:
        """Every chunk of the stream has usage."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(GenerateBody):
    """POST /v1/completions"""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerateBody.unsupported,
        "suffix": ("",),
    }

    prompt: Prompt
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)  # alternatives per token; 0: the chosen token's alone
    max_tokens: int = Field(16, ge=0)
    best_of: int | None = Field(None, ge=1)

    def token_limit(self) -> int | None:
        return self.max_tokens


class TextPart(Body):
    """One part of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. What a template may read besides role and content is handed through."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    role: str = Field(min_length=1)
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(GenerateBody):
    """POST /v1/chat/completions"""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerateBody.unsupported,
        "functions": (),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "input_ids": (),
        "chat_template": (),
        "documents": (),
        "web_search_options": (),
        "echo": (),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)  # counts with logprobs only
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    tools: list[ToolSpec] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None  # auto if there are tools
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    special_tokens_in_content: bool = False  # texts in messages may hold control tokens

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        for name in ("messages", "tools", "chat_template_kwargs"):
            check_depth(name, values.get(name))
        return super().parse(values)

    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


BODIES: tuple[type[Body], ...] = (CompletionBody, ChatBody)  # for the OpenAPI document
