"""A conversation as the text of a prompt, for clients that write the rest of the prompt themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chat_template import ChatTemplate
from .tokenizer import Tokenizer


def prompt_text(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """The rendered conversation, to be sent as ``text``: without the BOS that encoding a text adds.

    options: those of ChatTemplate.render. Raises RequestError as that does.
    """
    text = template.render(messages, **options)
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]:
        return text[len(bos) :]
    return text
