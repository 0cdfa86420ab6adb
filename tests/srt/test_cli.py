"""The command line: usage, errors in one line, and what must hold before any process starts."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from banyan.managers.config import ModelInfo, SchedulerInfo
from banyan.managers.errors import EngineDeadError, StartError
from banyan.srt import cli, model_source, serve
from banyan.srt.listen import bind
from banyan.srt.server_args import ServerArgs
from banyan.version import __version__


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """The command line sets up the root logger; put it back."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def test_import_is_light() -> None:
    code = "import sys, banyan.srt.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "zmq", "fastapi", "uvicorn", "pydantic", "asyncio", "tokenizers", "jinja2"} & set(loaded)


def test_serving_never_loads_torch() -> None:
    code = "import sys, banyan.srt.serve; print(*sys.modules); import banyan.srt.life; print('; life'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before_children, served = (part.split() for part in done.split("; life"))
    assert not {"torch", "transformers", "pickle5"} & set(served)
    assert "fastapi" in served
    assert not {"fastapi", "pydantic", "uvicorn", "prometheus_client"} & set(before_children), "imported while the children load"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == __version__ + "\n"


@pytest.mark.parametrize(
    "argv",
    [[], ["nope"], ["serve", "--nope"], ["serve", "--port", "x"], ["serve", "--dtype", "int8"], ["serve", "a", "--model", "b"]],
)
def test_wrong_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        cli.main(argv)
    assert info.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--port", "99999"], ["--page-size", "0"], ["/no/such/model"], ["--model-path", "nowhere.gguf"]])
def test_bad_options_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--explain", *argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("banyan: error: ")


def test_traceback_of_a_child_stands_above_the_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (StartError("it\nfailed", "Traceback: deep\n"), EngineDeadError("it\nfailed", "Traceback: deep\n")):

        def fail(args: ServerArgs, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(serve, "serve", fail)
        assert cli.main(["serve"]) == 1
        assert capsys.readouterr().err.splitlines() == ["Traceback: deep", "banyan: error: it failed"]


def test_occupied_port_is_told_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "launch", lambda args: pytest.fail("launched"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"banyan: error: port {port} on 127.0.0.1 is in use; choose another with --port\n"


def test_bind() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        with bind(host, 0) as sock:
            assert sock.getsockname()[1] > 0
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(StartError, match="cannot listen on"):
            bind(host, 0)


def test_fetch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def resolve(*args: Any) -> model_source.ResolvedModel:
        asked.append(args)
        return model_source.ResolvedModel(path="/p", origin="o", served_name="s")

    monkeypatch.setattr(model_source, "resolve_model", resolve)
    assert cli.main(["fetch"]) == 0
    assert cli.main(["fetch", "gemma3-270m", "--download-dir", "/d", "--revision", "r"]) == 0
    assert asked == [("smollm2", None, None), ("gemma3-270m", "r", "/d")]
    assert capsys.readouterr().out == "/p\n/p\n"


def test_explain_prints_and_stops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelInfo(
        model_type="llama",
        architectures=["L"],
        vocab_size=9,
        context_len=8,
        eos_token_ids=[2],
        bos_token_id=1,
        dtype="float32",
        device="cpu",
        attention_backend="native",
        load_format="gguf",
        explain={"dtype": "the CPU is slow with bfloat16"},
    )
    info = SchedulerInfo(
        model=model,
        max_total_num_tokens=7,
        max_req_input_len=6,
        max_req_len=8,
        max_running_requests=4,
        page_size=1,
        chunked_prefill_size=512,
        overlap=True,
        explain={"overlap": "there are cores enough", "threads": "2, one per core"},
    )

    class Launched:
        stopped: list[float] = []  # noqa: RUF012

        def __init__(self) -> None:
            self.info = info

        def stop(self, timeout: float) -> None:
            self.stopped.append(timeout)

    monkeypatch.setattr(serve, "launch", lambda args: Launched())
    assert cli.main(["serve", "--explain", "--page-size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  page_size = 4  (set; ") for line in lines)
    assert any(line.startswith("  port = 30000  (default; ") for line in lines)
    assert "  dtype = 'float32'  (the CPU is slow with bfloat16)" in lines
    assert "  overlap = True  (there are cores enough)" in lines
    assert "  threads  (2, one per core)" in lines
    assert "  max_total_num_tokens = 7" in lines
    assert Launched.stopped == [0]
