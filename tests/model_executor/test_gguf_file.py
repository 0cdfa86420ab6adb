"""GGUF files as the gguf package writes them, read back; and files that are not whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from banyan.model_executor.gguf_file import GGUFError, GGUFFile
from banyan.model_executor.gguf_quants import CHUNK, TYPES, dequantize

TOKENS = ["<s>", "grün", "日本", ""]


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("a.float", 0.5)
    writer.add_int64("a.long", -(1 << 40))
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "ein Baum")
    writer.add_token_list(TOKENS)
    writer.add_array("a.numbers", [1, -2, 3])
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("plain", weight)
    quantised = gguf.quants.quantize(np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64), GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantised", quantised, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("broken") / "broken.gguf"


def test_metadata(file: Path) -> None:
    meta = GGUFFile(str(file)).metadata
    assert meta["general.architecture"] == "llama"
    assert meta["llama.block_count"] == 3
    assert meta["a.float"] == 0.5
    assert meta["a.long"] == -(1 << 40)
    assert meta["a.flag"] is True
    assert meta["a.text"] == "ein Baum"
    assert meta["tokenizer.ggml.tokens"] == TOKENS
    assert meta["a.numbers"].tolist() == [1, -2, 3]


def test_tensors(file: Path) -> None:
    read = GGUFFile(str(file))
    assert list(read.tensors) == ["plain", "quantised"]
    assert read.tensors["plain"].shape == (2, 3)
    assert (read.tensor("plain") == np.arange(6).reshape(2, 3)).all()
    info = read.tensors["quantised"]
    assert (info.shape, info.type, info.nbytes) == ((4, 64), "Q8_0", 4 * 2 * 34)
    assert np.abs(read.tensor("quantised") - np.linspace(-1, 1, 256).reshape(4, 64)).max() < 1 / 127
    assert not read.raw("plain").flags.writeable
    assert read.tensor("plain").flags.writeable  # a copy, whatever the type


@pytest.mark.parametrize("type_id", sorted(TYPES), ids=lambda i: TYPES[i][0])
def test_dequantisation_agrees_with_the_gguf_package(type_id: int) -> None:
    name, block, block_bytes = TYPES[type_id]
    kind = GGMLQuantizationType(type_id)
    assert (kind.name, GGML_QUANT_SIZES[kind]) == (name, (block, block_bytes))
    blocks = CHUNK // block + 3  # more than one chunk, the last one short
    data = np.random.default_rng(type_id).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    halves = {"F32": [], "F16": [], "BF16": [], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q6_K": [208]}.get(name, [0, 2])
    for at in halves:  # scales: finite, of either sign
        data[:, at : at + 2] = np.random.default_rng(at).normal(0, 0.1, (blocks, 1)).astype(np.float16).view(np.uint8)
    if name in ("F32", "F16", "BF16"):
        data = np.random.default_rng(0).normal(0, 1, (blocks, block_bytes // 2)).astype("<f2").view(np.uint8)
    expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(dequantize(data.reshape(-1), name), expected.reshape(-1))


def test_a_part_is_a_part_of_the_whole(file: Path) -> None:
    gguf_file = GGUFFile(str(file))
    for name in ("plain", "quantised"):
        whole = gguf_file.tensor(name)
        assert np.array_equal(gguf_file.part(name, 0, 1, 2), whole[1:2])
        for start, stop in ((0, 2), (1, 3), (2, 3)) if name == "plain" else ((0, 32), (32, 64), (5, 40), (33, 35)):
            assert np.array_equal(gguf_file.part(name, 1, start, stop), whole[:, start:stop])
    with pytest.raises(GGUFError, match="has no part"):
        gguf_file.part("plain", 1, 2, 4)


def test_rare_types_go_through_the_gguf_package() -> None:
    kind = GGMLQuantizationType.IQ4_NL
    data = np.zeros((4, GGML_QUANT_SIZES[kind][1]), np.uint8)
    data[:, 1] = 0x3C  # scale 1.0
    assert (dequantize(data.reshape(-1), "IQ4_NL") == -127).all()
    with pytest.raises(GGUFError, match="Q8_K"):
        dequantize(data.reshape(-1), "Q8_K")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "version 1 is not supported"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(100), "little-endian"),
        (b"GGUF" + (3).to_bytes(4, "little"), "damaged at byte 8"),
    ],
)
def test_wrong_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message) as caught:
        GGUFFile(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_data_is_found_when_the_file_is_opened(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: GGUFFile(str(file)).tensors["quantised"].offset + 271])
    with pytest.raises(GGUFError, match=r"quantised ends at byte .* truncated"):
        GGUFFile(str(cut))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_truncation_goes_unnoticed(file: Path, scratch: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    last = GGUFFile(str(file)).tensors["quantised"]
    scratch.write_bytes(whole[: data.draw(st.integers(0, last.offset + last.nbytes - 1))])
    with pytest.raises(GGUFError):
        GGUFFile(str(scratch))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_raises_nothing_but_gguf_error(file: Path, scratch: Path, data: st.DataObject) -> None:
    content = bytearray(file.read_bytes())
    header = GGUFFile(str(file)).tensors["plain"].offset
    for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    scratch.write_bytes(content)
    try:
        read = GGUFFile(str(scratch))
        with np.errstate(all="ignore"):  # scales are arbitrary halves now
            for name, info in read.tensors.items():
                assert read.tensor(name).shape == info.shape
    except GGUFError as error:
        assert str(scratch) in str(error)
