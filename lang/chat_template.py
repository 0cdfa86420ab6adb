"""What is written between the turns of a conversation.

A program's text only ever grows, so a template is used as glue: the text between the content of one turn and that of the next. It
comes from the model's own template by rendering small conversations and looking at what stands between the contents
(RenderedTemplate), or from a table of prefixes and suffixes (TableTemplate).
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import LangError
from .ir import Role

Messages = list[dict[str, str]]
Render = Callable[[Messages, bool], str]  # messages, add_generation_prompt -> the text of a prompt

MARK = "\u27e6turn {}\u27e7"


class TemplateError(LangError):
    """A model has no chat template, or its template does not allow this order of roles."""


class ChatTemplate(ABC):
    """stop_strings end an assistant's turn. default_system_prompt is inserted by the program's state where a conversation does not
    begin with a system turn; None where there is none, or where the template writes its own."""

    default_system_prompt: str | None = None
    image_token = "<image>"

    @property
    @abstractmethod
    def stop_strings(self) -> tuple[str, ...]:
        """Ends of an assistant's turn."""

    @abstractmethod
    def begin(self, before: Role | None, role: Role) -> str:
        """The text that opens a turn after a turn of ``before`` was closed; None: it is the first."""

    @abstractmethod
    def end(self, role: Role) -> str:
        """The text that closes a turn, whatever comes next."""


class RenderedTemplate(ChatTemplate):
    """Glue from a function that renders conversations. Safe to use from several threads; each glue is rendered once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[Role | None, Role], str] = {}
        self._ends: dict[Role, str] = {}
        self._lock = threading.Lock()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What closes an assistant's turn, without blanks."""
        mark = self.end("assistant").strip()
        return (mark,) if mark else ()

    def begin(self, before: Role | None, role: Role) -> str:
        """Raises TemplateError if the template refuses this order of roles."""
        glue = self._glue(before, role)
        return glue if before is None else glue.removeprefix(self.end(before))

    def end(self, role: Role) -> str:
        """What all continuations have in common."""
        with self._lock:
            known = self._ends.get(role)
        if known is None:
            followers: tuple[Role, ...] = ("assistant",) if role == "user" else ("user",)
            texts = [text for follower in followers if (text := self._try_glue(role, follower)) is not None]
            closed = self._try(_history(role), False)
            if closed is not None:
                texts.append(closed.rpartition(MARK.format(len(_history(role)) - 1))[2])
            known = _common_prefix(texts)
            with self._lock:
                self._ends[role] = known
        return known

    def _glue(self, before: Role | None, role: Role) -> str:
        with self._lock:
            known = self._known.get((before, role))
        if known is None:
            known = self._render_glue(before, role)
            with self._lock:
                self._known[before, role] = known
        return known

    def _render_glue(self, before: Role | None, role: Role) -> str:
        history = _history(before)
        last = MARK.format(len(history) - 1) if history else ""
        if role == "assistant" and before is not None:
            return _after(self._render(history, True), last, before, role)
        longer = [*history, {"role": role, "content": MARK.format(len(history))}]
        if role == "system":  # some templates show a system turn only before a user's
            longer.append({"role": "user", "content": MARK.format(len(longer))})
        text = _after(self._render(longer, False), last, before, role)
        head, found, _ = text.partition(MARK.format(len(history)))
        if not found:
            raise TemplateError(f"the chat template does not show a turn of {role!r} after {before!r}")
        return head

    def _try(self, messages: Messages, generate: bool) -> str | None:
        try:
            return self._render(messages, generate)
        except LangError:
            return None

    def _try_glue(self, before: Role, role: Role) -> str | None:
        try:
            return self._glue(before, role)
        except LangError:
            return None


def _history(last: Role | None) -> Messages:
    """A conversation that ends with a turn of that role, as short as templates allow."""
    roles = {None: (), "system": ("system",), "user": ("user",), "assistant": ("user", "assistant")}[last]
    return [{"role": role, "content": MARK.format(index)} for index, role in enumerate(roles)]


def _common_prefix(texts: list[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")  # the two that differ first
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _after(text: str, mark: str, before: Role | None, role: Role) -> str:
    if not mark:
        return text
    _, found, rest = text.rpartition(mark)
    if not found:
        raise TemplateError(f"the chat template does not show a turn of {before!r} before {role!r}")
    return rest


@dataclass(frozen=True)
class TableTemplate(ChatTemplate):
    """A prefix and a suffix per role."""

    name: str
    roles: dict[str, tuple[str, str]]
    stops: tuple[str, ...] = ()
    default_system_prompt: str | None = None
    image_token: str = "<image>"
    system_in_user: tuple[str, str] | None = field(
        default=None
    )  # marks around a system turn that stands inside the first user turn

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """As in the table."""
        return self.stops

    def begin(self, before: Role | None, role: Role) -> str:
        """The prefix."""
        if self.system_in_user is not None:
            if role == "system":
                return self.roles["user"][0] + self.system_in_user[0]
            if role == "user" and before == "system":
                return ""
        return self.roles[role][0]

    def end(self, role: Role) -> str:
        """The suffix."""
        if self.system_in_user is not None and role == "system":
            return self.system_in_user[1]
        return self.roles[role][1]


def _marked(name: str, form: str, end: str, *, system: str | None = None) -> TableTemplate:
    """A family of templates that writes the role's name into one form."""
    roles = {role: (form.format(role), end) for role in ("system", "user", "assistant")}
    return TableTemplate(name, roles, (end.strip(),), system)


HELPFUL = "You are a helpful assistant."
CHATML = ("<|im_start|>{}\n", "<|im_end|>\n")
_INST = {"system": ("", ""), "user": ("[INST] ", " [/INST]"), "assistant": ("", " </s><s>")}

TEMPLATES: dict[str, TableTemplate] = {
    template.name: template
    for template in (
        TableTemplate("default", {r: (f"{r.upper()}:", "\n") for r in ("system", "user", "assistant")}),
        TableTemplate(
            "claude", {"system": ("", ""), "user": ("\n\nHuman: ", ""), "assistant": ("\n\nAssistant:", "")}, ("\n\nHuman:",)
        ),
        _marked("chatml", *CHATML),
        _marked("qwen", *CHATML, system=HELPFUL),
        _marked("qwen2-vl", *CHATML, system=HELPFUL),
        TableTemplate(
            "vicuna_v1.1",
            {"system": ("", " "), "user": ("USER:", " "), "assistant": ("ASSISTANT:", "</s>")},
            default_system_prompt="A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions.",
        ),
        TableTemplate("llama-2-chat", _INST, system_in_user=("<<SYS>>\n", "\n<</SYS>>\n\n")),
        TableTemplate("mistral", {**_INST, "assistant": ("", " </s>")}, ("</s>",), system_in_user=("", "\n\n")),
        _marked("llama-3-instruct", "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
        _marked("llama-4", "<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
        _marked("yi-1.5", *CHATML),
        _marked("dbrx-instruct", *CHATML),
        TableTemplate(
            "gemma-it",
            {
                "system": ("", ""),
                "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
                "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
            },
        ),
        _marked("granite-3-instruct", "<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
        TableTemplate(
            "deepseek-v3",
            {"system": ("", ""), "user": ("<｜User｜>", ""), "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")},
            ("<｜end▁of▁sentence｜>",),
        ),
    )
}
_BY_PATH = (
    (r"deepseek-(v3|r1)(?!.*base)", "deepseek-v3"),
    (r"dbrx.*instruct", "dbrx-instruct"),
    (r"vicuna", "vicuna_v1.1"),
    (r"llama-2.*chat|codellama.*instruct", "llama-2-chat"),
    (r"(mistral|mixtral).*instruct", "mistral"),
    (r"llama-3.*instruct", "llama-3-instruct"),
    (r"llama-4.*instruct", "llama-4"),
    (r"tinyllama|smollm.*instruct", "chatml"),
    (r"qwen.*vl", "qwen2-vl"),
    (r"qwen.*(chat|instruct)", "qwen"),
    (r"yi-1\.5.*chat", "yi-1.5"),
    (r"gemma.*it\b|gemma-3", "gemma-it"),
    (r"granite.*instruct", "granite-3-instruct"),
)


def get_chat_template(name: str) -> ChatTemplate:
    """The table's template of that name. Raises ValueError that lists the names."""
    if name not in TEMPLATES:
        raise ValueError(f"unknown chat template {name!r}; known are {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def get_chat_template_by_model_path(path: str) -> ChatTemplate | None:
    """A guess for servers that cannot be asked; None where the name says nothing."""
    for pattern, name in _BY_PATH:
        if re.search(pattern, path, re.IGNORECASE):
            return TEMPLATES[name]
    return None
