"""How the native kernels are built, cached and refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from banyan.layers.kernels.cpu import build as build_module
from banyan.layers.kernels.cpu import library
from banyan.layers.kernels.cpu.build import LEVELS, BuildError, build, choose_level, supported_levels
from banyan.layers.kernels.cpu.library import NotNative, native_kernels
from banyan.srt import cli

FAKE = """#!/bin/sh
case "$*" in *--version*) echo "fake 1"; exit 0;; esac
echo run >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that makes empty files; the log has a line for each run of it."""
    compiler, log = tmp_path / "cxx", tmp_path / "log"
    compiler.write_text(FAKE.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "cache"))
    return log


def test_a_library_is_built_once(fake: Path, tmp_path: Path) -> None:
    first = build("generic")
    runs = fake.read_text()
    second = build("generic")
    assert first.seconds is not None and second.seconds is None
    assert first.path == second.path and first.path.is_relative_to(tmp_path / "cache" / "kernels")
    assert fake.read_text() == runs
    assert [path.name for path in first.path.parent.iterdir()] == ["kernels.so"]


def test_what_a_library_depends_on_changes_its_place(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {build("generic").path, build("avx2").path}
    monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-g"))
    places.add(build("generic").path)
    monkeypatch.setattr(build_module, "cpu_flags", lambda: frozenset({"another"}))
    places.add(build("generic").path)
    assert len(places) == 4


def test_a_compiler_that_fails_is_told(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "cxx").write_text("#!/bin/sh\ncase $1 in --version) echo v;; *) echo broken >&2; exit 3;; esac\n")
    with pytest.raises(BuildError, match="failed with status 3") as info:
        build("generic")
    assert "broken" in info.value.detail
    assert not list((tmp_path / "cache" / "kernels").glob("*/kernels.so"))


def test_without_a_compiler_torch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path))
    monkeypatch.delenv("BANYAN_CPU_KERNELS", raising=False)
    monkeypatch.setattr(library, "load", library.load.__wrapped__)  # another test of this process may have loaded it
    result = native_kernels.__wrapped__()
    assert isinstance(result, NotNative)
    assert "no-such-compiler" in result.why
    assert len(caplog.records) == 1


def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_CPU_KERNELS", "0")
    assert native_kernels.__wrapped__() == NotNative("off: BANYAN_CPU_KERNELS is 0")


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported_levels()[0] == "generic"
    monkeypatch.setattr(build_module, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.delenv("BANYAN_CPU_ISA", raising=False)
    assert choose_level()[0] == "avx2"
    monkeypatch.setenv("BANYAN_CPU_ISA", "generic")
    assert choose_level()[0] == "generic"
    monkeypatch.setenv("BANYAN_CPU_ISA", "avx512")
    with pytest.raises(ValueError, match="lacks avx512bw"):
        choose_level()
    monkeypatch.setenv("BANYAN_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="unknown"):
        choose_level()


def test_the_command_says_what_it_did(fake: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build-kernels"]) == 0
    out = capfd.readouterr().out
    assert str(tmp_path / "cache" / "kernels") in out and "fake 1" in out and "built in" in out
    (tmp_path / "cxx").unlink()
    assert cli.main(["build-kernels"]) == 1
    assert "no C++ compiler" in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_compiles(level: str) -> None:
    """Levels that this CPU cannot run as well."""
    result = subprocess.run(
        [sys.executable, "-c", f"from {build_module.__name__} import build; print(build({level!r}).path)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
