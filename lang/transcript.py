"""What a state has said so far: its text, its conversation, its pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .chat_template import ChatTemplate
from .errors import LangError
from .ir import Role


@dataclass(frozen=True)
class Prompt:
    """A snapshot for a backend. messages: the closed turns and, as the last, the open one with what it holds so far."""

    text: str
    messages: list[dict[str, Any]]
    role: Role | None
    images: tuple[Any, ...]


@dataclass
class Transcript:
    """Grows at its end only. template is called when the first turn is opened. turn_start: where the open turn's content begins."""

    template: Callable[[], ChatTemplate]
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    role: Role | None = None
    turn_start: int = 0
    images: tuple[Any, ...] = ()
    turn_images: int = 0  # pictures before the open turn

    def copy(self) -> Transcript:
        """One that grows by itself."""
        return replace(self, messages=list(self.messages))

    def append(self, text: str) -> None:
        """Add text to the open turn, or outside of any."""
        self.text += text

    def begin(self, role: Role) -> None:
        """Open a turn. Raises LangError inside another."""
        if self.role is not None:
            raise LangError(f"a turn of {role!r} inside a turn of {self.role!r}")
        template = self.template()
        if not self.messages and role != "system" and template.default_system_prompt is not None:
            self._turn(template, "system", template.default_system_prompt)
        self._open(template, role)

    def end(self, role: Role) -> None:
        """Close the turn. Raises LangError if it is not open."""
        if self.role != role:
            raise LangError(f"the end of a turn of {role!r}, but {'none' if self.role is None else repr(self.role)} is open")
        self.messages.append({"role": role, "content": self.open_content()})
        self.role = None
        self.append(self.template().end(role))

    def open_content(self) -> Any:
        """The open turn's content: text, or parts where it has pictures."""
        text = self.text[self.turn_start :]
        pictures = self.images[self.turn_images :]
        if not pictures:
            return text.lstrip()
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        return [*parts, {"type": "text", "text": text.lstrip()}]

    def prompt(self) -> Prompt:
        """As it is now."""
        messages = list(self.messages)
        if self.role is not None:
            messages.append({"role": self.role, "content": self.open_content()})
        return Prompt(self.text, messages, self.role, self.images)

    def extend(self, other: Transcript, since: Transcript) -> None:
        """Append what another has said since it was a copy of ``since``. Raises LangError if it stopped inside another turn."""
        if other.role != self.role or (self.role is not None and len(other.messages) != len(since.messages)):
            raise LangError("a fork can be appended only if it ends in the turn in which it began")
        self.text += other.text[len(since.text) :]
        self.messages += other.messages[len(since.messages) :]
        self.images += other.images[len(since.images) :]

    def _turn(self, template: ChatTemplate, role: Role, content: str) -> None:
        self._open(template, role)
        self.append(content)
        self.end(role)

    def _open(self, template: ChatTemplate, role: Role) -> None:
        before: Role | None = self.messages[-1]["role"] if self.messages else None
        self.append(template.begin(before, role))
        self.role = role
        self.turn_start = len(self.text)
        self.turn_images = len(self.images)
