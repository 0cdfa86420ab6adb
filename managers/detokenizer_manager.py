"""The detokenizer process: token ids in, text out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import zmq

from .config import DetokenizerConfig
from .detokenizer import Detokenizer
from .faults import Faults
from .io_struct import ShutdownReq, ToDetokenizer
from .ipc import Receiver, Sender
from .processes.no_pickle import forbid_unpickling
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

POLL_INTERVAL = 1.0  # seconds; only bounds how long one wait lasts
EXIT_FAULT = 70  # status of a death that was asked for


def run_detokenizer(config: DetokenizerConfig, ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve until a ShutdownReq arrives. ``ready`` is called once the socket is bound. Raises StartError."""
    faults = Faults.from_env()
    tokenizer = Tokenizer.load(config.tokenizer_path, encoder=False)
    detokenizer = Detokenizer(tokenizer)
    _ = tokenizer.byte_table  # built now, not with the first token
    context: zmq.Context[Any] = zmq.Context()
    receiver: Receiver[ToDetokenizer] = Receiver(context, config.ipc.detokenizer, ToDetokenizer)
    sender = Sender(context, config.ipc.tokenizer)
    try:
        forbid_unpickling()
        ready({})
        while True:
            receiver.wait(POLL_INTERVAL)
            if not _serve(receiver.receive_all(), detokenizer, sender, faults):
                return
    finally:
        receiver.close()
        sender.close()
        context.term()


def _serve(messages: list[ToDetokenizer], detokenizer: Detokenizer, sender: Sender, faults: Faults) -> bool:
    """Handle what has arrived; False after a ShutdownReq."""
    for message in messages:
        if isinstance(message, ShutdownReq):
            return False
        _inject(faults)
        try:
            text = detokenizer.process(message)
        except ValueError:
            logger.exception("a message was dropped")
            continue
        if text.rids:
            sender.send(text)
    return True


def _inject(faults: Faults) -> None:
    """Carry out the faults that BANYAN_FAULTS asks of the detokenizer."""
    if delay := faults.value("detokenizer_delay"):
        time.sleep(delay)
    if faults.at("detokenizer_die"):
        os._exit(EXIT_FAULT)
