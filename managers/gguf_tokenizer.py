"""The tokenizer that a GGUF file's metadata describes.

A GGUF holds the vocabulary, the merges (or none: then the vocabulary implies them) and the name of a pre-tokenizer, not the rules.
The rules are those of the models' own tokenizer.json files. Where llama.cpp's key names carry a default, it is llama.cpp's.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..model_executor.gguf_file import GGUFError, GGUFFile
from .constrained.token_bytes import BYTE_OF_CHAR, CHAR_OF_BYTE
from .errors import StartError

logger = logging.getLogger(__name__)

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\u2581"  # how SentencePiece writes a space
GEMMA_ARCHITECTURES = frozenset({"gemma", "gemma2", "gemma3", "gemma3n"})

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SPLITS = {
    "llama3": _WORDS_LLAMA3 + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,
    "qwen2": _WORDS_LLAMA3 + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,
    "qwen35": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL,
    "tekken": "|".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL,
    "gpt-4o": "|".join(word + _CONTRACTIONS + "?" for word in _CASED) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL,
}
_KINDS = {
    "llama3": "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe",
    "qwen2": "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2",
    "qwen35": "qwen35",
    "tekken": "tekken",
    "gpt-4o": "gpt-4o llama4 kanana2 talkie minimax-m2",
    "digits": "smollm starcoder refact command-r codeshell exaone minerva-7b",  # every digit alone, then GPT-2's rule
    "gpt-2": "gpt-2 default mpt olmo jais phi-2 trillion",
}
KIND_OF_PRE = {name: kind for kind, names in _KINDS.items() for name in names.split()}

BYTE_LEVEL_DECODER: dict[str, Any] = {"type": "ByteLevel"}
SPM_DECODER: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
SPM_PREFIX_DECODER: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [*SPM_DECODER["decoders"], {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
}


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """What a GGUF says about its tokenizer. ``build`` makes the encoder, which takes most of the time; nothing else needs it."""

    tokens: list[str]
    special_ids: frozenset[int]
    decoder: dict[str, Any]
    bos_id: int | None
    eos_id: int | None
    end_of_turn_ids: tuple[int, ...]
    chat_template: str | None
    build: Callable[[], tokenizers.Tokenizer]


def read_gguf_vocabulary(path: str) -> GGUFVocabulary:
    """Read a GGUF file's tokenizer. Raises StartError that names the path."""
    try:
        metadata = GGUFFile(path).metadata
    except (GGUFError, OSError) as error:
        raise StartError(str(error)) from None  # names the path
    return vocabulary_of(metadata, path)


def vocabulary_of(metadata: dict[str, Any], path: str) -> GGUFVocabulary:
    """The tokenizer that this metadata describes; ``path`` is for messages."""
    reader = _Metadata(metadata, path)
    model = reader.ggml("model")
    if model == "gpt2":
        tokens = [_byte_level_spelling(token) for token in reader.tokens]
        decoder = BYTE_LEVEL_DECODER
    elif model == "llama":
        tokens = reader.tokens
        if reader.is_gemma:
            tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        decoder = SPM_PREFIX_DECODER if reader.add_space_prefix else SPM_DECODER
    else:
        raise StartError(f"{path}: tokenizer model {model!r} is not supported (gpt2 and llama are)")
    control, plain = reader.added_ids(tokens, byte_level=model == "gpt2")
    special = [id for id in (reader.id(name) for name in ("bos", "eos", "unknown", "padding")) if id is not None]
    control = sorted({*control, *special})

    def build() -> tokenizers.Tokenizer:
        with _no_gc():
            backend = _byte_level_backend(reader, tokens) if model == "gpt2" else _spm_backend(reader, tokens)
            backend.add_special_tokens([AddedToken(tokens[id], normalized=False, special=True) for id in control])
            backend.add_tokens([AddedToken(tokens[id], normalized=False, special=False) for id in plain])
            backend.post_processor = reader.post_processor(tokens)
        return backend

    return GGUFVocabulary(
        tokens=tokens,
        special_ids=frozenset(control),
        decoder=decoder,
        bos_id=reader.id("bos"),
        eos_id=reader.id("eos"),
        end_of_turn_ids=tuple(id for id in (reader.id("eot"), reader.id("eom")) if id is not None),
        chat_template=metadata.get("tokenizer.chat_template"),
        build=build,
    )


class _Metadata:
    """Typed access to the tokenizer's keys."""

    def __init__(self, metadata: dict[str, Any], path: str) -> None:
        self._metadata = metadata
        self._path = path
        tokens = self.ggml("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise StartError(f"{path}: the file holds no vocabulary (tokenizer.ggml.tokens)")
        self.tokens: list[str] = tokens

    def ggml(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def id(self, name: str) -> int | None:
        """The id that tokenizer.ggml.<name>_token_id gives, if it is one of the vocabulary."""
        value = self.ggml(f"{name}_token_id")
        if value is None:
            return None
        if not 0 <= int(value) < len(self.tokens):
            raise StartError(f"{self._path}: {name}_token_id {value} is outside the vocabulary of {len(self.tokens)}")
        return int(value)

    @property
    def is_gemma(self) -> bool:
        return self._metadata.get("general.architecture") in GEMMA_ARCHITECTURES

    @property
    def add_space_prefix(self) -> bool:
        return bool(self.ggml("add_space_prefix", not self.is_gemma))

    @property
    def kind(self) -> str:
        """The pre-tokenizer's kind, a key of _KINDS."""
        pre = self.ggml("pre", "default")
        if pre not in KIND_OF_PRE:
            logger.warning(
                "%s: pre-tokenizer %r is not known, GPT-2's is used; ids may differ from the model's own", self._path, pre
            )
        return KIND_OF_PRE.get(pre, "gpt-2")

    def added_ids(self, tokens: Sequence[str], *, byte_level: bool) -> tuple[list[int], list[int]]:
        """(control ids, user-defined ids): tokens that are matched whole in a text.

        In a byte-level vocabulary a control token that uses a character outside the byte alphabet was mislabelled by the converter
        and stays out; a respelled token (Gemma's runs of spaces) is found by its merges.
        """
        types = self.ggml("token_type")
        types = [] if types is None else [int(kind) for kind in types]
        control = [id for id, kind in enumerate(types) if kind == CONTROL]
        if byte_level:
            control = [id for id in control if all(char in BYTE_OF_CHAR for char in self.tokens[id])]
        plain = [id for id, kind in enumerate(types) if kind == USER_DEFINED and tokens[id] == self.tokens[id]]
        return control, plain

    def merges(self, tokens: Sequence[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
        """The file's merges, or all pairs that the vocabulary implies, in the order of the vocabulary (Gemma) or of the scores."""
        given = self.ggml("merges")
        if given is not None:
            pairs = [merge.split(" ") for merge in given]
            if any(len(pair) != 2 for pair in pairs):
                raise StartError(f"{self._path}: a merge is not a pair of tokens")
            return [(left, right) for left, right in pairs]
        order = tokens
        if not self.is_gemma:
            scores = self.ggml("scores")
            if scores is None or len(scores) != len(tokens):
                raise StartError(f"{self._path}: the file has neither merges nor a score for each token")
            order = [token for _, token in sorted(zip(scores, tokens, strict=True), key=lambda pair: -pair[0])]
        return [
            (left, right)
            for token in order
            for cut in range(len(token) - 1, 0, -1)
            if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
        ]

    def post_processor(self, tokens: Sequence[str]) -> processors.PostProcessor:
        """Adds BOS and EOS where the file, or llama.cpp's default for such a file, says so."""
        add_bos_default = self.ggml("model") == "llama" or self.kind == "llama3"
        wanted = [("bos", "add_bos_token", add_bos_default), ("eos", "add_eos_token", False)]
        ids = {name: self.id(name) for name, key, default in wanted if self.ggml(key, default)}
        return template_processor({name: (tokens[id], id) for name, id in ids.items() if id is not None})


def template_processor(added: dict[str, tuple[str, int]]) -> processors.PostProcessor:
    """The post-processor that puts the (token, id) of "bos" before and that of "eos" behind a text."""
    before = [f"{added['bos'][0]}:0"] if "bos" in added else []
    behind = [f"{added['eos'][0]}:0"] if "eos" in added else []
    return processors.TemplateProcessing(single=[*before, "$A:0", *behind], special_tokens=list(dict.fromkeys(added.values())))


def _byte_level_spelling(token: str) -> str:
    """The token in the byte alphabet; some converters wrote plain text."""
    if all(char in BYTE_OF_CHAR for char in token):
        return token
    return "".join(CHAR_OF_BYTE[byte] for byte in token.encode("utf-8", "surrogatepass"))


def _byte_level_backend(reader: _Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    vocab = {token: id for id, token in enumerate(tokens)}
    kind = reader.kind
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=reader.merges(tokens, vocab), fuse_unk=False, ignore_merges=kind == "llama3")
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    elif kind == "digits":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    return backend


def _spm_backend(reader: _Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    vocab = {token: id for id, token in enumerate(tokens)}
    unknown = reader.id("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=reader.merges(tokens, vocab),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if reader.add_space_prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(steps)
    return backend


@contextmanager
def _no_gc() -> Iterator[None]:
    """Hundreds of thousands of small tuples without the collector walking them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
