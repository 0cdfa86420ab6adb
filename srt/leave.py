"""The quick end of a server: for signals that come while it starts, and for the second one."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType
from typing import NoReturn

log = logging.getLogger(__name__)


def leave(status: int) -> NoReturn:
    """End this process now. The children see their parent's end, delete the sockets and go too."""
    logging.shutdown()
    os._exit(status)


def leave_on_signals() -> None:
    """SIGTERM and SIGINT end the process, with status 0, until others listen to them."""

    def leave_now(number: int, frame: FrameType | None) -> None:
        log.info("%s while starting", signal.Signals(number).name)
        leave(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave_now)
