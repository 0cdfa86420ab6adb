"""Starts that fail and processes that are killed: one clear line, a status, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from server import DEADLINE, Server, all_gone, oracle_folder, until

from banyan.managers.ipc import IpcNames


def last_line(server: Server) -> str:
    """The line that a failed start ends with."""
    assert server.process.wait(DEADLINE) == 1, server.text()
    assert server.directories() == []
    line = server.text().splitlines()[-1]
    assert line.startswith("banyan: error: ")
    return line.removeprefix("banyan: error: ")


def test_a_killed_server_leaves_no_child_and_no_socket(start: Callable[..., Server]) -> None:
    server = start()
    server.wait_ready()
    children = server.children()
    assert len(children) == len(server.directories()) + 1 == 2
    server.process.kill()
    server.process.wait()
    until(lambda: all_gone(children) and not server.directories(), seconds=10)


def test_a_server_killed_while_starting_leaves_nothing(start: Callable[..., Server]) -> None:
    server = start()
    until(lambda: len(server.children()) == 2)
    children = server.children()
    server.process.kill()
    server.process.wait()
    until(lambda: all_gone(children) and not server.directories(), seconds=10)


def test_the_next_start_sweeps_what_a_massacre_left(start: Callable[..., Server]) -> None:
    """All processes killed at once: nobody could delete the sockets. What lives, or is nobody's known, stays."""
    server = start()
    server.wait_ready()
    children = server.children()
    for child in children.values():
        child.suspend()
    server.process.kill()
    for child in children.values():
        child.kill()
    server.process.wait()
    until(lambda: all_gone(children))
    [left] = server.directories()
    stranger = server.folder / "banyan-cake"
    stranger.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(server.folder))
        first = IpcNames.create()
        assert not left.exists()
        second = IpcNames.create()
        assert os.path.exists(first.directory)
        assert os.path.exists(second.directory)
        assert stranger.exists()
        for names in (first, second):
            assert os.stat(names.directory).st_mode & 0o777 == 0o700
            names.remove()
            names.remove()
        assert server.directories() == [stranger]


def test_ctrl_c_in_a_terminal(start: Callable[..., Server]) -> None:
    """Ctrl-C reaches the children too: only the parent decides, so the end is a clean one."""
    server = start()
    server.wait_ready()
    children = server.children()
    for process in (*children.values(), psutil.Process(server.process.pid)):
        process.send_signal(signal.SIGINT)
    assert server.end() == 0
    assert all_gone(children)
    assert "Traceback" not in server.text()


def test_an_occupied_port(start: Callable[..., Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = start("--port", str(port))
        assert server.process.wait(DEADLINE) == 1
    assert server.text() == f"banyan: error: port {port} on 127.0.0.1 is in use; choose another with --port\n"


def gguf(folder: Path, *, size: int) -> str:
    """The beginning of a GGUF file."""
    folder.mkdir()

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    entry = string("general.architecture") + struct.pack("<I", 8) + string("llama")
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry
    (folder / "model.gguf").write_bytes(data[:size])
    return str(folder / "model.gguf")


def broken_models(folder: Path) -> dict[str, tuple[str, str]]:
    """name -> (model path, words of the error)."""
    bad_json = oracle_folder(folder / "bad-json")
    (folder / "bad-json" / "config.json").write_text('{"model_type": ')
    bad_weights = oracle_folder(folder / "bad-weights")
    (folder / "bad-weights" / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 50) + b"{}")
    return {
        "nowhere": (str(folder / "nowhere"), "does not exist"),
        "cut in the middle": (gguf(folder / "cut", size=40), "model.gguf: a string at byte"),
        "unsupported": (
            oracle_folder(folder / "unsupported", architectures=["WhisperForConditionalGeneration"], model_type="whisper"),
            "hisper",
        ),
        "bad json": (bad_json, "config.json"),
        "bad weights": (bad_weights, "model.safetensors"),
    }


def test_models_that_cannot_be_served(start: Callable[..., Server], tmp_path: Path) -> None:
    """One clear line each, below it nothing; above it the child's traceback if it was a child that found out."""
    models = broken_models(tmp_path)
    servers: dict[str, Server] = {}
    for name, (path, _) in models.items():
        servers[name] = start(model=path, load_format="auto")
    for name, (_, words) in models.items():
        line = last_line(servers[name])
        assert words in line, (name, line)
        assert line.count(models[name][0]) == 1, line
        assert len(line) < 400
        text = servers[name].text()
        assert text.count("Traceback") <= 1, (name, text)
        assert ("Traceback" in text) == ("failed to start" in line), (name, text)
