"""Tokenizers that are made in milliseconds, written as folders a Tokenizer loads from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "the quick brown fox jumps over the lazy dog, the end. 12 34",
    "User: hello\nObservation: 世界 ď 😀 über e\u0301\n",
    "</tool_call> five six seven \ufffd",
] * 3
SPACE = "\u2581"


def byte_level_folder(folder: Path, **config: Any) -> Path:
    """A byte-level BPE with 64 merges; ids 0 and 1 are the special <s> and </s>."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + 64,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    backend.add_special_tokens([AddedToken("<|eot_id|>", normalized=False)])
    return _save(backend, folder, {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, **config})


def byte_fallback_folder(folder: Path, *, strip: bool = True, **config: Any) -> Path:
    """SentencePiece BPE as in Llama 2: byte fallback, spaces written as U+2581, one put before the text and taken off again."""
    words = [SPACE, "h", "i", SPACE + "h", SPACE + "hi", "a", "b", "世", "\n", SPACE * 2, "fi", "f", "v", "e", "\ufffd"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [(SPACE, "h"), (SPACE + "h", "i"), (SPACE, SPACE), ("f", "i")]
    vocab = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _save(backend, folder, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config})


def metaspace_folder(folder: Path) -> Path:
    """A decoder that is no concatenation of bytes: the leading space of the first token is dropped."""
    tokens = ["<unk>", "<s>", SPACE + "hello", SPACE + "world", "ly", SPACE, "世", "\ufffd", "s"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>"])
    return _save(backend, folder, {"bos_token": "<s>"})


def _save(backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
