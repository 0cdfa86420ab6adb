"""The part of a chat request that is about tools."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_TOOLS = 256


class FunctionSpec(BaseModel):
    """A function that the model may call. parameters: JSON schema of its arguments, an object; none if it takes none.

    strict: its arguments follow the schema, whatever tool_choice says.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1, max_length=128, pattern=r"^[\w.:/-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _is_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError("the type of a function's parameters must be object")
        if schema is not None and not isinstance(schema.get("properties", {}), dict):
            raise ValueError("properties must be an object")
        return schema


class ToolSpec(BaseModel):
    """One of ``tools``."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = "function"
    function: FunctionSpec


class NamedFunction(BaseModel):
    """Which function must be called."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str


class NamedChoice(BaseModel):
    """tool_choice that names a function."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"] = "function"
    function: NamedFunction


class ReasoningOptions(BaseModel):
    """``reasoning`` of a request: another spelling of reasoning_effort, and a switch."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enabled: bool | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedChoice
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | float
