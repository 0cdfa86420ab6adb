from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tiny_tokenizers import byte_level_folder

from banyan.managers.config import DetokenizerConfig
from banyan.managers.detokenizer_manager import run_detokenizer
from banyan.managers.errors import StartError
from banyan.managers.io_struct import DecodeOptions, FinishReason, ShutdownReq, TextOutput, TokenOutput, ToTokenizer, pack_ids
from banyan.managers.ipc import IpcNames, Receiver, Sender
from banyan.managers.tokenizer import Tokenizer


class Running:
    """A detokenizer in a thread, and both ends of its links."""

    def __init__(self, names: IpcNames, folder: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.receiver: Receiver[Any] = Receiver(self.context, names.tokenizer, ToTokenizer)
        self.payloads: list[dict[str, Any]] = []
        ready = threading.Event()

        def report(payload: dict[str, Any]) -> None:
            self.payloads.append(payload)
            ready.set()

        config = DetokenizerConfig(ipc=names, tokenizer_path=str(folder))
        self.thread = threading.Thread(target=run_detokenizer, args=(config, report))
        self.thread.start()
        assert ready.wait(30)
        self.sender = Sender(self.context, names.detokenizer)

    def ask(self, message: TokenOutput) -> list[TextOutput]:
        self.sender.send(message)
        assert self.receiver.wait(30)
        answers: list[TextOutput] = self.receiver.receive_all()
        return answers

    def stop(self) -> None:
        self.sender.send(ShutdownReq())
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.sender.close()
        self.receiver.close()
        self.context.term()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_level_folder(tmp_path)


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    names = IpcNames.create()
    process = Running(names, folder)
    yield process
    process.stop()
    names.remove()


def row(rid: str, ids: list[int], finish: FinishReason | None = None, *, first: bool = False) -> TokenOutput:
    return TokenOutput(
        rids=[rid],
        token_ids=pack_ids(ids),
        num_ids=[len(ids)],
        finish_reasons=[finish],
        prompt_tokens=[1],
        completion_tokens=[len(ids)],
        cached_tokens=[0],
        num_retractions=[0],
        options=[(0, DecodeOptions())] if first else [],
    )


def test_ids_come_back_as_text_until_shutdown(running: Running, folder: Path) -> None:
    ids = Tokenizer.load(str(folder)).encode("the 😀 end")
    assert running.payloads == [{}]
    texts = []
    for rank, id in enumerate(ids):
        finish = FinishReason(kind="length", length=len(ids)) if rank == len(ids) - 1 else None
        [answer] = running.ask(row("r", [id], finish, first=rank == 0))
        assert (answer.rids, answer.finish_reasons) == (["r"], [finish])
        texts += answer.texts
    assert "".join(texts) == "the 😀 end"


def test_messages_that_do_not_fit_and_unknown_rids_leave_the_others_alone(
    running: Running, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [x] = Tokenizer.load(str(folder)).encode("x")
    bad = row("bad", [x], first=True)
    bad.num_ids = [3]
    running.sender.send(bad)
    running.sender.send(row("unknown", [x]))
    [answer] = running.ask(row("good", [x], first=True))
    assert (answer.rids, answer.texts) == (["good"], ["x"])
    assert "do not fit" in caplog.text
    assert "unknown" in caplog.text


def test_a_tokenizer_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    names = IpcNames.create()
    try:
        with pytest.raises(StartError, match="nowhere"):
            run_detokenizer(DetokenizerConfig(ipc=names, tokenizer_path=str(tmp_path / "nowhere")), lambda payload: None)
    finally:
        names.remove()
