"""The language's settings for a whole process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend.base import Backend


@dataclass
class GlobalConfig:
    """Names and defaults are SGLang's. verbosity: 1 prints each program's text at its end, 2 also its steps."""

    verbosity: int = 0
    default_backend: Backend | None = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True  # join always concatenates text; the name is kept for programs that set it


global_config = GlobalConfig()
