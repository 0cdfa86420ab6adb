"""Packed weights kept between starts: mapped bit for bit as they were packed; whatever is wrong with a file, it is packed anew."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from banyan.layers.kernels.cpu.library import Native, native_kernels
from banyan.model_executor import packed_file, weight_cache
from banyan.model_executor.model_runner import ModelRunner
from banyan.model_executor.step import RunnerConfig

LIMIT = 1 << 30
SHAPES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
pytestmark = pytest.mark.skipif(not isinstance(native_kernels(), Native), reason="no native kernels: nothing is packed")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The cache folder; small models count."""
    monkeypatch.setattr(weight_cache, "cache_folder", lambda: tmp_path / "packed")
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    monkeypatch.setattr(weight_cache, "GIB", 1)
    return tmp_path / "packed"


@pytest.fixture
def start(folder, tmp_path):
    """Loads the model of a config; all runners are closed at the end."""
    runners: list[ModelRunner] = []

    def load(config: transformers.PreTrainedConfig | None = None, name: str = "model", **options: Any) -> ModelRunner:
        path = tmp_path / name
        if not path.exists():
            torch.manual_seed(len(name))
            model = transformers.AutoModelForCausalLM.from_config(config or transformers.LlamaConfig(**SHAPES))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
            model.save_pretrained(path)
        runner_config = RunnerConfig(model_path=str(path), max_total_tokens=64, **{"weight_cache_bytes": LIMIT} | options)
        runners.append(ModelRunner(runner_config))
        return runners[-1]

    yield load
    for runner in runners:
        runner.close()


def contents(runner: ModelRunner) -> dict[str, Any]:
    """Every parameter and packed weight of a model."""
    model = runner._loaded_model()
    found: dict[str, Any] = {name: parameter.tolist() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if (packed := getattr(module, "packed", None)) is not None:
            found[f"{name} packed"] = [(w.kind, w.n, w.k, bytes(w.data.numpy())) for w in packed.weights]
            found[f"{name} bias"] = None if packed.bias is None else packed.bias.tolist()
            found[f"{name} product"] = packed(torch.ones(3, packed.k)).tolist()
    return found


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


FAMILIES = {
    "untied": transformers.LlamaConfig(**SHAPES),
    "tied": transformers.LlamaConfig(**SHAPES, tie_word_embeddings=True),
    "biases": transformers.Qwen2Config(**SHAPES),
}


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mapped_model_is_the_packed_one(start, folder, family, quantization) -> None:
    plain = start(FAMILIES[family], quantization=quantization, weight_cache_bytes=0)
    first = start(quantization=quantization)
    (file,) = kept(folder)
    second = start(quantization=quantization)
    assert kept(folder) == [file], "the second start found the file of the first"
    assert plain.info.explain["weight_cache"].startswith("off")
    for runner in (first, second):
        assert runner.info.explain["weight_cache"].startswith(f"mapped from {file}")
        assert contents(runner) == contents(plain)


def test_a_file_is_of_one_form_and_one_checkpoint(start, folder) -> None:
    start()
    start(quantization="int8")
    start(dtype="bfloat16")
    start(name="another model")
    assert len(kept(folder)) == 4
    model = folder.parent / "model" / "model.safetensors"
    os.utime(model, ns=(1, 1))
    start()
    assert len(kept(folder)) == 5, "the checkpoint was replaced"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "cut in the header": lambda data: data[:200],
    "grown": lambda data: data + b"\0",
    "other magic": lambda data: b"X" + data[1:],
    "header": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "a header that claims gigabytes": lambda data: data[:8] + b"\xff" * 8 + data[16:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_packed_anew(start, folder, caplog, damage) -> None:
    caplog.set_level("WARNING", logger=weight_cache.__name__)
    wanted = contents(start(weight_cache_bytes=0))
    start()
    (file,) = kept(folder)
    whole = file.read_bytes()
    file.unlink()  # a file is never written to: models map it
    file.write_bytes(DAMAGES[damage](whole))
    runner = start()
    assert "packed anew" in caplog.text
    assert contents(runner) == wanted
    assert file.read_bytes() == whole, "the next start maps it again"


def test_a_header_of_other_extents_is_refused(start, folder, monkeypatch) -> None:
    """Even one whose digest is right."""
    whole = packed_file._place

    def shifted(key: str, pieces: list[Any], nbytes: int) -> tuple[bytes, int]:
        return whole(
            key, [packed_file._Piece(p.path, p.offset, p.nbytes * 2, p.shape, p.name, p.dtype, p.kind) for p in pieces], nbytes
        )

    monkeypatch.setattr(packed_file, "_place", shifted)
    assert start().info.explain["weight_cache"] == "packed now"
    assert start().info.explain["weight_cache"] == "packed now", "it still serves"


@pytest.mark.parametrize("obstacle", ["folder", "disk full", "disk nearly full", "too large"])
def test_what_cannot_be_kept_is_served_all_the_same(start, folder, monkeypatch, obstacle) -> None:
    options: dict[str, Any] = {}
    if obstacle == "folder":
        folder.write_text("a file where the folder should be")
    elif obstacle == "disk full":

        def write(path: Path, *_: Any) -> None:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(weight_cache, "write", write)
    elif obstacle == "disk nearly full":
        monkeypatch.setattr(weight_cache, "GIB", 1 << 60)
    else:
        options["weight_cache_bytes"] = 1000
    runner = start(**options)
    assert runner.info.explain["weight_cache"].startswith("not kept: ")
    if obstacle != "folder":
        assert [path.suffix for path in folder.iterdir()] == [".lock"], "nothing is left behind"


def test_small_models_leave_nothing(start, folder, monkeypatch) -> None:
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1 << 20)
    assert start().info.explain["weight_cache"].startswith("off: so small")
    assert not folder.exists()


def test_what_was_not_used_for_longest_makes_room(start, folder) -> None:
    start()
    (first,) = kept(folder)
    size = first.stat().st_size
    start(name="second model", weight_cache_bytes=2 * size + 100)
    assert len(kept(folder)) == 2
    os.utime(first, ns=(1, 1))
    start()  # uses the first again
    second = next(path for path in kept(folder) if path != first)
    os.utime(second, ns=(2, 2))
    abandoned = folder / "0123.partial"
    abandoned.write_bytes(b"of a process that was killed")
    runner = start(name="a third model", weight_cache_bytes=2 * size + 100)
    assert first in kept(folder)
    assert second not in kept(folder)
    assert not abandoned.exists()
    assert len(kept(folder)) == 2
    assert contents(runner), "it is served"


def test_several_starts_at_once_pack_once(start, folder, monkeypatch) -> None:
    start(weight_cache_bytes=0)  # makes the checkpoint
    fills: list[int] = []
    fill = weight_cache.packed

    def counted(*args: Any) -> Any:
        fills.append(1)
        return fill(*args)

    monkeypatch.setattr(weight_cache, "packed", counted)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fills) == 1


def test_weights_that_were_laid_over_are_not_kept(start, folder, tmp_path) -> None:
    runner = start()
    before = contents(runner)
    start(name="other weights", weight_cache_bytes=0)
    runner.update_weights(str(tmp_path / "other weights"), "auto", partial=False)
    assert contents(runner) != before
    assert len(kept(folder)) == 1
    runner.update_weights(str(tmp_path / "model"), "auto", partial=False)
    assert contents(runner) == before
