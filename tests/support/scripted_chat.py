"""A chat model for the oracle that says what the last message holds: its template writes that message as the oracle's script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from harness import CONFIG
from tokenizers import AddedToken, decoders, models, pre_tokenizers

VOCAB = 1024
EOS, TOOL_CALL = "<|im_end|>", ("<tool_call>", "</tool_call>")  # both marks are control tokens
SCRIPT_LEN = VOCAB - 2

# the script's mark, its length, the message, the end of the answer, and blanks that are never said; a mark is one token
TEMPLATE = f"""<|{VOCAB - 1}|><|{SCRIPT_LEN}|>
{{%- set said = messages[-1].content %}}
{{%- set opened = said.split('{TOOL_CALL[0]}') | length - 1 %}}
{{%- set closed = said.split('{TOOL_CALL[1]}') | length - 1 %}}
{{{{- said }}}}{EOS}{{{{ ' ' * ({SCRIPT_LEN - 1} - said | length + 10 * opened + 11 * closed) }}}}
{{%- if tools %}}{{% endif %}}"""


def scripted_chat_folder(folder: Path, **config: Any) -> str:
    """A tokenizer of single bytes, where <tool_call> and </tool_call> are control tokens, and a config for the oracle."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", EOS, *alphabet]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    more = [*TOOL_CALL, *(f"<|{id}|>" for id in range(len(tokens) + len(TOOL_CALL), VOCAB))]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ["<s>", "</s>", EOS, *more]])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": EOS, "chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": VOCAB}))
    return str(folder)
