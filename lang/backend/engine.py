"""EngineBackend: an Engine in this process."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...managers.chat_template import ChatTemplate as Renderer
from ...managers.errors import BanyanError, RequestError
from ...managers.prompt_text import prompt_text
from ..chat_template import ChatTemplate, Messages, RenderedTemplate, TemplateError
from ..errors import BackendError
from .native import NativeBackend

if TYPE_CHECKING:
    from ...managers.tokenizer import Tokenizer
    from ...srt.engine import Engine


_templates: WeakKeyDictionary[Any, ChatTemplate] = WeakKeyDictionary()  # of each tokenizer manager


class EngineBackend(NativeBackend):
    """The same calls as a server's, without HTTP."""

    name = "the engine"

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def post(self, body: dict[str, Any]) -> Any:
        """Engine.generate."""
        try:
            return self.engine.generate(**_arguments(body))
        except BanyanError as error:
            raise BackendError(str(error), status=getattr(error, "status_code", None)) from error

    def post_stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Engine.generate with stream=True."""
        try:
            chunks: Any = self.engine.generate(**_arguments(body))
            with closing(chunks):  # leaving it aborts the request
                yield from chunks
        except BanyanError as error:
            raise BackendError(str(error), status=getattr(error, "status_code", None)) from error

    def get_model_info(self) -> dict[str, Any]:
        """Engine.get_model_info."""
        return self.engine.get_model_info()

    def get_chat_template(self) -> ChatTemplate:
        """The model's own, or the one that the engine was given."""
        manager = self.engine.tokenizer_manager
        template = _templates.get(manager)
        if template is None:
            template = _templates[manager] = template_of(manager.tokenizer, manager.config.chat_template)
        return template

    def flush_cache(self) -> bool:
        """Engine.flush_cache; False while requests run."""
        return self.engine.flush_cache().success

    def get_server_info(self) -> dict[str, Any]:
        """Engine.get_server_info."""
        return self.engine.get_server_info()

    def shutdown(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()


def template_of(tokenizer: Tokenizer, path: str | None = None) -> ChatTemplate:
    """The tokenizer's chat template, or the one in a file, as glue. What it refuses is a TemplateError."""
    renderer = Renderer.of(tokenizer, path)

    def render(messages: Messages, generate: bool) -> str:
        try:
            return prompt_text(renderer, tokenizer, messages, add_generation_prompt=generate)
        except RequestError as error:
            raise TemplateError(str(error)) from None

    return RenderedTemplate(render)


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    return {"prompt" if name == "text" else name: value for name, value in body.items()}
