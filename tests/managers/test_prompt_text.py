"""prompt_text: the ids of its text are those of the conversation, whether or not encoding adds BOS."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import byte_fallback_folder, byte_level_folder

from banyan.managers.chat_template import ChatTemplate
from banyan.managers.prompt_text import prompt_text
from banyan.managers.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "adds", "text"),
    [
        ("{{ bos_token }}[{{ messages[0].content }}]", True, "[hi]"),
        ("[{{ messages[0].content }}]", True, "[hi]"),
        ("{{ bos_token }}[{{ messages[0].content }}]", False, "<s>[hi]"),
    ],
)
def test_bos_comes_once(tmp_path: Path, template: str, adds: bool, text: str) -> None:
    folder = byte_fallback_folder(tmp_path) if adds else byte_level_folder(tmp_path)
    tokenizer = Tokenizer.load(str(folder))
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) is adds
    found = prompt_text(ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token), tokenizer, MESSAGES)
    assert found == text
    assert tokenizer.encode(found).count(tokenizer.bos_token_id) <= 1
