"""uvicorn's protocol with a bound on what it keeps of a request head that never ends, and deaf to offers of another protocol."""

from __future__ import annotations

import re
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .auth import MAX_HEAD_BYTES

MAX_UNFINISHED_BYTES = 4 * MAX_HEAD_BYTES  # heads that end below it get an answer that says what is wrong
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_OFFER = re.compile(rb"\r\nupgrade(?=[ \t]*:)", re.IGNORECASE)


class HeadLimitProtocol(HttpToolsProtocol):
    """Closes a connection whose request head grows past MAX_UNFINISHED_BYTES.

    A client may offer to go on in HTTP/2 (Java's does with every request) and must be answered in HTTP/1.1 by a server that does
    not want to. The parser takes the offer as accepted and would lose the body, so it does not get to see it.

    When the client goes, every request that it has sent ahead must know: uvicorn tells the newest alone.
    """

    _in_head = True
    _is_fresh = True  # nothing of the next request has come
    _num_bytes = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unanswered: deque[RequestResponseCycle] = deque()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unanswered.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began_before = self._in_head
        super().data_received(_without_offer(data) if began_before or self._is_fresh else data)
        if not (began_before and self._in_head) or self.transport.is_closing():
            return
        self._num_bytes += len(data)  # what came in one piece with the end of another request does not count
        if self._num_bytes > MAX_UNFINISHED_BYTES:
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head, self._is_fresh, self._num_bytes = True, False, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        if self.cycle is not None:
            self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        self._is_fresh = True
        super().on_message_complete()


def _without_offer(data: bytes) -> bytes:
    """The beginning of a request, or more of its head, with any Upgrade header under a name that nobody knows."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    return data if _OFFER.search(data, 0, end) is None else _OFFER.sub(b"\r\nx-not-upgraded", data[:end]) + data[end:]
