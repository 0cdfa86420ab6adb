"""Tokenizer: text to ids and back, from a Hugging Face folder or a GGUF file, without transformers.

All methods are safe to call from several threads; encoding releases the GIL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from .constrained.token_bytes import ByteTable, byte_table
from .errors import RequestError, StartError
from .gguf_tokenizer import read_gguf_vocabulary, template_processor

END_OF_TURN_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")  # a chat model ends its turn with them
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"


class Tokenizer:
    """One model's tokenizer.

    tokens: the token of each id, None where an id is unused. special_ids: ids that skip_special_tokens drops. eos_token_ids: every
    id that ends a text or a turn. chat_templates: sources by name, "default" is the usual one. vocab_size: one more than the
    largest id.
    """

    def __init__(
        self,
        *,
        tokens: Sequence[str | None],
        special_ids: frozenset[int],
        decoder: Mapping[str, Any] | None,
        build: Callable[[], tokenizers.Tokenizer],
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int | None] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.tokens = tokens
        self.special_ids = special_ids
        self.bos_token_id = bos_token_id
        own = [id for id in eos_token_ids if id is not None]
        self.eos_token_id = own[0] if own else None
        turns = [id for id in sorted(special_ids) if tokens[id] in END_OF_TURN_TOKENS]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *turns]))
        self.chat_templates = dict(chat_templates or {})
        self._decoder = decoder
        self._build = build

    @classmethod
    def load(cls, path: str, *, encoder: bool = True) -> Tokenizer:
        """Load from a folder with a tokenizer.json or from a .gguf file. Raises StartError that names the path.

        encoder: False puts off building what only ``encode`` needs until it is called (most of the time for a GGUF file).
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # callers bring their own threads
        tokenizer = _from_folder(Path(path)) if os.path.isdir(path) else _from_gguf(path)
        if encoder:
            try:
                _ = tokenizer.backend
            except StartError:
                raise
            except Exception as error:  # the library raises bare Exceptions
                raise StartError(f"{path}: the tokenizer cannot be built: {error}") from None
        return tokenizer

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The encoder; takes up to seconds to build."""
        backend = self._build()
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def byte_table(self) -> ByteTable | None:
        """The bytes of each token, or None if the decoder is of a kind that needs more than that."""
        return byte_table(self.tokens, self.special_ids, self._decoder)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self.tokens[self.bos_token_id]

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self.tokens[self.eos_token_id]

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template; None for a base model."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with BOS and EOS where the tokenizer adds them. Raises RequestError for what is not Unicode text."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text."""
        for text in texts:
            if not text.isascii():
                _check_unicode(text)
        # the batch call is the one that releases the GIL; the fast one leaves character offsets out
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> str:
        """The text of these ids; ids outside the vocabulary are empty.

        spaces_between_special_tokens changes nothing: no tokenizer of this kind puts spaces there. With byte fallback each invalid
        byte is one U+FFFD, and valid bytes beside it stay (the tokenizers library replaces the whole run of bytes).
        """
        size = self.vocab_size
        known = [int(id) for id in ids if 0 <= id < size]
        table = self.byte_table
        if table is None:
            return str(self.backend.decode(known, skip_special_tokens=skip_special_tokens))
        pieces = table.visible if skip_special_tokens else table.tokens
        text = b"".join([pieces[id] for id in known]).decode("utf-8", table.errors)
        return text.removeprefix(" ") if table.strip_space else text


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"text is not valid Unicode: a lone surrogate at character {error.start}.", param="text") from None


def _from_gguf(path: str) -> Tokenizer:
    if not os.path.isfile(path):
        raise StartError(f"{path}: no such folder or file to load a tokenizer from")
    vocabulary = read_gguf_vocabulary(path)
    template = vocabulary.chat_template
    return Tokenizer(
        tokens=vocabulary.tokens,
        special_ids=vocabulary.special_ids,
        decoder=vocabulary.decoder,
        build=vocabulary.build,
        bos_token_id=vocabulary.bos_id,
        eos_token_ids=[vocabulary.eos_id, *vocabulary.end_of_turn_ids],
        chat_templates={DEFAULT_TEMPLATE: template} if template else {},
    )


def _from_folder(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        hint = " (a SentencePiece model alone is not enough)" if (folder / "tokenizer.model").exists() else ""
        raise StartError(f"{folder}: no tokenizer.json{hint}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions
        raise StartError(f"{folder}/tokenizer.json: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
    names = {"bos_token", "eos_token", "unk_token", "pad_token"}
    specials = {
        key: _token_text(value) for key, value in (_read_json(folder / "special_tokens_map.json") | config).items() if key in names
    }
    _add_missing(backend, config, specials)
    ids: dict[str, int] = {}
    for name, token in specials.items():
        if token is not None and (id := backend.token_to_id(token)) is not None:
            ids[name] = id
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        wanted = [name for name in ("bos", "eos") if config.get(f"add_{name}_token") and f"{name}_token" in ids]
        backend.post_processor = template_processor(
            {name: (specials[f"{name}_token"] or "", ids[f"{name}_token"]) for name in wanted}
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, id in vocab.items():
        tokens[id] = token
    return Tokenizer(
        tokens=tokens,
        special_ids=frozenset(id for id, added in backend.get_added_tokens_decoder().items() if added.special),
        decoder=json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None,
        build=lambda: backend,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=[ids.get("eos_token")],
        chat_templates=_folder_templates(folder, config),
    )


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any], specials: Mapping[str, str | None]) -> None:
    """Tokens that the config declares special, or adds, and tokenizer.json does not know as such."""
    known = {added.content: added for added in backend.get_added_tokens_decoder().values()}
    for entry in config.get("added_tokens_decoder", {}).values():
        if entry["content"] not in known:
            flags = {key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            backend.add_tokens([AddedToken(entry["content"], **flags)])
            known[entry["content"]] = AddedToken(entry["content"], **flags)
    for token in specials.values():
        if token is not None and (token not in known or not known[token].special):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files win over the config's key."""
    given = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(given, str):
        templates[DEFAULT_TEMPLATE] = given
    elif isinstance(given, list):
        templates = {entry["name"]: entry["template"] for entry in given}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if DEFAULT_TEMPLATE not in templates and len(templates) == 1:
        templates[DEFAULT_TEMPLATE] = next(iter(templates.values()))
    return templates


def _token_text(value: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise StartError(f"{path}: not a JSON object")
    return data
