from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tiny_tokenizers import byte_fallback_folder, byte_level_folder
from tokenizers import pre_tokenizers

from banyan.managers.constrained.token_bytes import CHAR_OF_BYTE
from banyan.managers.errors import RequestError, StartError
from banyan.managers.gguf_tokenizer import KIND_OF_PRE, vocabulary_of
from banyan.managers.tokenizer import Tokenizer
from banyan.model_executor.gguf_file import GGUFFile

CORPUS = [
    "",
    "Hello world",
    " leading",
    "  two spaces",
    "trailing   ",
    "世界 ď 😀 👩‍👩‍👧 e\u0301 ﬁ",
    "def f(x):\n    return x + 1\n\n\n\tif x:\n",
    "don't I'LL we're SHE'D",
    "مرحبا بالعالم। हिन्दी ไทย",
    "<s>hi</s><bos>x<eos><|im_start|>user\nhi<|im_end|>\n<end_of_turn>\n\n",
    "a" * 300,
    "\x00\x01\x7f\u200b\ufffd",
    "https://example.org/a?b=c&d=%20 snake_case CamelCase ...!!?",
    "tabs\t\tand\r\nlines\r\n\r\n  x",
]
DIGITS = ["\n\n1. one\n\n2. two", "x=   5", "1234 12.5e-7 2024-01-01", "½ ①② x²", "a1b22  333"]


# --- folders ----------------------------------------------------------------------------------------------------------------------


def test_a_folder_gives_ids_tokens_and_specials(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(byte_level_folder(tmp_path)))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.vocab_size == len(tokenizer.tokens) == tokenizer.backend.get_vocab_size()
    eot = tokenizer.backend.token_to_id("<|eot_id|>")
    assert tokenizer.eos_token_ids == (1, eot)
    assert tokenizer.special_ids == {0, 1, eot}
    assert tokenizer.chat_template is None
    for text in CORPUS:
        assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("config", "before", "behind"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [0], []),
        ({"add_eos_token": True}, [], [1]),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
    ],
)
def test_bos_and_eos_are_added_as_the_config_says(
    tmp_path: Path, config: dict[str, bool], before: list[int], behind: list[int]
) -> None:
    tokenizer = Tokenizer.load(str(byte_level_folder(tmp_path, **config)))
    plain = tokenizer.encode("the end", add_special_tokens=False)
    assert tokenizer.encode("the end") == [*before, *plain, *behind]
    assert tokenizer.encode_batch(["the end", ""]) == [[*before, *plain, *behind], [*before, *behind]]
    assert tokenizer.encode_batch([]) == []


def test_special_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    config: dict[str, Any] = {"eos_token": "<end>", "added_tokens_decoder": {"500": {"content": "<tool>", "special": False}}}
    tokenizer = Tokenizer.load(str(byte_level_folder(tmp_path, **config)))
    end, tool = tokenizer.eos_token_id, tokenizer.backend.token_to_id("<tool>")
    assert tokenizer.encode("<tool><end>") == [tool, end]
    assert end in tokenizer.special_ids
    assert tokenizer.decode([tool, end]) == "<tool>"


def test_special_tokens_map_is_read_where_the_config_is_silent(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.load(str(folder)).eos_token is None
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert Tokenizer.load(str(folder)).eos_token_ids[0] == 1


def test_templates_of_a_folder(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = byte_level_folder(tmp_path, chat_template=named)
    assert Tokenizer.load(str(folder)).chat_templates == {"default": "D", "tool_use": "T"}
    (folder / "chat_template.jinja").write_text("F")
    assert Tokenizer.load(str(folder)).chat_template == "F"
    byte_level_folder(tmp_path / "one", chat_template="S")
    assert Tokenizer.load(str(tmp_path / "one")).chat_template == "S"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"
    assert len(tokenizer.encode("q")) == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_a_damaged_folder_ends_the_start_with_its_path(tmp_path: Path, name: str, damage: str) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / name).write_text(damage)
    with pytest.raises(StartError, match=name):
        Tokenizer.load(str(folder))


def test_what_is_no_tokenizer_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="nowhere"):
        Tokenizer.load(str(tmp_path / "nowhere"))
    with pytest.raises(StartError, match=r"no tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(StartError, match="SentencePiece"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"not a gguf")
    with pytest.raises(StartError, match=r"x\.gguf"):
        Tokenizer.load(str(tmp_path / "x.gguf"))


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(byte_level_folder(tmp_path)))
    with pytest.raises(RequestError, match="lone surrogate at character 2") as info:
        tokenizer.encode("ab\ud800c")
    assert info.value.param == "text"


def test_encoding_from_many_threads(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(byte_fallback_folder(tmp_path)))
    texts = [f"hi five {number} 世" for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]


def test_encoding_releases_the_gil(tmp_path: Path) -> None:
    """Another thread gets on while one long text is encoded."""
    tokenizer = Tokenizer.load(str(byte_level_folder(tmp_path)))
    text = "the quick brown 世界 fox " * 40_000
    running, done, ticks_inside = threading.Event(), threading.Event(), 0

    def encode() -> None:
        running.set()
        tokenizer.encode(text)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # a thread that holds the GIL now gives it up by itself only
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        running.wait()
        while not done.is_set():
            ticks_inside += 1
            thread.join(0.0005)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert ticks_inside > 3


def test_loading_brings_in_neither_torch_nor_transformers() -> None:
    code = "import banyan.managers.tokenizer, banyan.managers.detokenizer_manager, banyan.managers.chat_template, sys;"
    code += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


# --- GGUF metadata ----------------------------------------------------------------------------------------------------------------


def byte_level_metadata(**ggml: Any) -> dict[str, Any]:
    tokens = [*CHAR_OF_BYTE.values(), "ab", "<bos>", "<eos>", "<odd control>", "<think>"]
    types = [1] * 257 + [3, 3, 3, 4]
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": np.array(types, np.int32), "merges": ["a b"]}
    values |= {"bos_token_id": 257, "eos_token_id": 258, **ggml}
    return {"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def spm_metadata(architecture: str = "llama", **ggml: Any) -> dict[str, Any]:
    pieces = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581ab", "  "]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -2.0, -1.0, -3.0, -4.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 7 + [4]
    values = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": types, "scores": np.array(scores, np.float32)}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **ggml}
    return {"general.architecture": architecture} | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def tokens_of(metadata: dict[str, Any], text: str, *, special: bool = True) -> list[str]:
    vocabulary = vocabulary_of(metadata, "x.gguf")
    return list(vocabulary.build().encode(text, add_special_tokens=special).tokens)


def test_byte_level_vocabulary_of_a_gguf() -> None:
    assert tokens_of(byte_level_metadata(), "cab<eos><think>") == ["c", "ab", "<eos>", "<think>"]
    assert tokens_of(byte_level_metadata(add_bos_token=True, add_eos_token=True), "c") == ["<bos>", "c", "<eos>"]
    assert tokens_of(byte_level_metadata(add_bos_token=True), "c", special=False) == ["c"]
    assert vocabulary_of(byte_level_metadata(), "x.gguf").special_ids == {257, 258}  # <odd control> has a space: mislabelled


def test_llama_3_files_without_the_flag_add_bos() -> None:
    assert tokens_of(byte_level_metadata(pre="llama-bpe"), "c") == ["<bos>", "c"]
    assert tokens_of(byte_level_metadata(pre="llama-bpe", add_bos_token=False), "c") == ["c"]


def test_spm_merges_follow_the_scores() -> None:
    assert tokens_of(spm_metadata(), "abc") == ["<s>", "\u2581", "a", "bc"]
    assert tokens_of(spm_metadata(add_space_prefix=False, add_bos_token=False), "abc") == ["a", "bc"]
    assert tokens_of(spm_metadata(add_space_prefix=False, add_bos_token=False), "é") == ["<0xC3>", "<0xA9>"]


def test_gemma_merges_follow_the_vocabulary_and_runs_of_spaces_are_respelled() -> None:
    assert tokens_of(spm_metadata("gemma3", add_bos_token=False), "abc") == ["ab", "c"]
    assert tokens_of(spm_metadata("gemma3", add_bos_token=False), "a  b") == ["a", "\u2581\u2581", "b"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "llama"}, "no vocabulary"),
        (byte_level_metadata(model="bert"), "'bert' is not supported"),
        (byte_level_metadata(eos_token_id=261), "outside the vocabulary"),
        (spm_metadata(scores=None), "neither merges nor a score"),
        (byte_level_metadata(merges=["a b c"]), "not a pair"),
    ],
)
def test_damaged_metadata_ends_the_start(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message) as info:
        vocabulary_of(metadata, "x.gguf").build()
    assert str(info.value).startswith("x.gguf: ")


def test_an_unknown_pre_tokenizer_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert tokens_of(byte_level_metadata(pre="of-tomorrow"), "c") == ["c"]
    assert "of-tomorrow" in caplog.text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Don", "'t", "ĠSAY", "ĠABC", "123456", "Ċ", "Ċ", "9"]),
        ("smollm", ["Don", "'t", "ĠSAY", "ĠABC", "1", "2", "3", "4", "5", "6", "ĊĊ", "9"]),
        ("llama-bpe", ["Don", "'t", "ĠSAY", "ĠABC", "123", "456", "ĊĊ", "9"]),
        ("qwen2", ["Don", "'t", "ĠSAY", "ĠABC", "1", "2", "3", "4", "5", "6", "ĊĊ", "9"]),
        ("qwen35", ["Don", "'t", "ĠSAY", "ĠABC", "1", "2", "3", "4", "5", "6", "ĊĊ", "9"]),
        ("tekken", ["Don", "'t", "ĠSAY", "ĠABC", "1", "2", "3", "4", "5", "6", "ĊĊ", "9"]),
        ("gpt-4o", ["Don't", "ĠSAY", "ĠABC", "123", "456", "ĊĊ", "9"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre: str, pieces: list[str]) -> None:
    split = vocabulary_of(byte_level_metadata(pre=pre), "x.gguf").build().pre_tokenizer
    assert [piece for piece, _ in split.pre_tokenize_str("Don't SAY ABC123456\n\n9")] == pieces


# --- the real files ---------------------------------------------------------------------------------------------------------------


def _model_file(name: str) -> Path:
    from banyan.srt.model_source import resolve_model

    return Path(resolve_model(name).path)


def _reference(path: Path) -> tokenizers.Tokenizer:
    """What transformers makes of the file, less its slow reader of metadata."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    metadata = GGUFFile(str(path)).metadata
    names = theirs.GGUF_TOKENIZER_MAPPING["tokenizer"]
    values = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    backend: tokenizers.Tokenizer = theirs.convert_gguf_tokenizer(metadata["general.architecture"], values)[0]
    return backend


def _check_real(tokenizer: Tokenizer, reference: tokenizers.Tokenizer, texts: list[str]) -> None:
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.vocab_size == reference.get_vocab_size()
    added = {id for id, token in reference.get_added_tokens_decoder().items() if token.special}
    assert tokenizer.special_ids == added
    assert tokenizer.backend.decoder.__getstate__() == reference.decoder.__getstate__()


@pytest.mark.model
def test_smollm2_ids_equal_transformers() -> None:
    """Transformers does not know the pre-tokenizer `smollm`: it leaves digits with what stands before them, which the model never
    saw in training. Without digits the ids are equal, with digits once each digit is a piece of its own.
    """
    path = _model_file("smollm2")
    tokenizer, reference = Tokenizer.load(str(path)), _reference(path)
    assert not [token for token in tokenizer.tokens if len(token or "") > 1 and any(char in "0123456789" for char in token or "")]
    _check_real(tokenizer, reference, CORPUS)
    reference.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), reference.pre_tokenizer])
    _check_real(tokenizer, reference, CORPUS + DIGITS)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2,))
    assert tokenizer.encode("the") == tokenizer.encode("the", add_special_tokens=False)
    assert "<|im_start|>" in (tokenizer.chat_template or "")


@pytest.mark.model
def test_gemma_3_ids_equal_transformers() -> None:
    path = _model_file("gemma3-270m")
    tokenizer = Tokenizer.load(str(path))
    _check_real(tokenizer, _reference(path), CORPUS + DIGITS)
    assert tokenizer.encode("the") == [2, *tokenizer.encode("the", add_special_tokens=False)]
    assert tokenizer.encode_batch(["", "<bos>"]) == [[2], [2, 2]]
    assert tokenizer.eos_token_ids == (1, 106)
    assert tokenizer.chat_template is None


@pytest.mark.model
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35", "gpt-2"])
def test_splits_equal_transformers(pre: str) -> None:
    from transformers import GPT2Tokenizer
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    reference = theirs.set_split_regex(GPT2Tokenizer(vocab={"a": 0}, merges=[]), {"pre_tokenizer_type": pre}).backend_tokenizer
    ours = vocabulary_of(byte_level_metadata(pre=pre), "x.gguf").build()
    for text in CORPUS + DIGITS:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == reference.pre_tokenizer.pre_tokenize_str(text)
    assert set(theirs.GGUF_PRE_TOKENIZER_SPLITS) <= KIND_OF_PRE.keys()
