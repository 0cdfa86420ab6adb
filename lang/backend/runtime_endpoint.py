"""RuntimeEndpoint: a Banyan server, or one of SGLang's."""

from __future__ import annotations

import os.path
import threading
from collections.abc import Generator
from typing import Any

from ..chat_template import (
    ChatTemplate,
    Messages,
    RenderedTemplate,
    TemplateError,
    get_chat_template,
    get_chat_template_by_model_path,
)
from ..errors import BackendError
from .http import HttpClient
from .native import NativeBackend

NO_ROUTE = (404, 405)
PROBE: Messages = [{"role": "user", "content": "hello"}]


class RuntimeEndpoint(NativeBackend):
    """A server at base_url. verify: a file of CA certificates, or False. timeout: seconds without a byte, None for ever.

    chat_template_name: a template of lang/chat_template.py's table; without it the server is asked for its model's own.
    Raises BackendError if no server answers.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        chat_template_name: str | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.base_url = base_url
        self.name = f"the server at {base_url}"
        self._http = HttpClient(base_url, api_key=api_key, verify=verify, timeout=timeout)
        self._lock = threading.Lock()
        self._template = None if chat_template_name is None else get_chat_template(chat_template_name)
        self._model_info: dict[str, Any] = self._http.json("GET", "/get_model_info")

    def post(self, body: dict[str, Any]) -> Any:
        """POST /generate."""
        return self._http.json("POST", "/generate", body)

    def post_stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """POST /generate, as events."""
        return self._http.events("/generate", body)

    def get_model_info(self) -> dict[str, Any]:
        """As the server told at the beginning."""
        return self._model_info

    def get_chat_template(self) -> ChatTemplate:
        """The name that was given; the server's rendering; the template in the tokenizer's folder; a guess by the model's path.

        Raises TemplateError if none of these knows.
        """
        with self._lock:
            if self._template is None:
                self._template = self._ask() or self._read() or get_chat_template_by_model_path(self.get_model_name())
            if self._template is None:
                raise TemplateError(f"{self.name} does not tell its chat template; give RuntimeEndpoint a chat_template_name")
            return self._template

    def flush_cache(self) -> bool:
        """POST /flush_cache; False while requests run."""
        try:
            self._http.json("POST", "/flush_cache")
        except BackendError as error:
            if error.status == 400:
                return False
            raise
        return True

    def get_server_info(self) -> dict[str, Any]:
        """GET /server_info"""
        info: dict[str, Any] = self._http.json("GET", "/server_info")
        return info

    def start_profile(self) -> None:
        """GET /start_profile"""
        self._http.json("GET", "/start_profile")

    def stop_profile(self) -> None:
        """GET /stop_profile"""
        self._http.json("GET", "/stop_profile")

    def shutdown(self) -> None:
        """Close the connections; the server goes on."""
        self._http.close()

    def _render(self, messages: Messages, generate: bool) -> str:
        answer = self._http.json("POST", "/apply-template", {"messages": messages, "add_generation_prompt": generate})
        return str(answer["prompt"])

    def _ask(self) -> ChatTemplate | None:
        try:
            self._render(PROBE, True)
        except BackendError as error:
            if error.status in NO_ROUTE:
                return None
            raise TemplateError(str(error)) from error
        return RenderedTemplate(self._render)

    def _read(self) -> ChatTemplate | None:
        path = str(self._model_info.get("tokenizer_path") or self.get_model_name())
        return rendered_from_folder(path) if os.path.isdir(path) else None


def rendered_from_folder(path: str) -> ChatTemplate | None:
    """The template of a tokenizer in a local folder; None if it has none."""
    from ...managers.tokenizer import Tokenizer
    from .engine import template_of

    tokenizer = Tokenizer.load(path)
    return None if tokenizer.chat_template is None else template_of(tokenizer)
