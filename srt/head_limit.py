"""uvicorn's protocol with a bound on what it keeps of a request head that never ends."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .auth import MAX_HEAD_BYTES

MAX_UNFINISHED_BYTES = 4 * MAX_HEAD_BYTES  # heads that end below it get an answer that says what is wrong
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HeadLimitProtocol(HttpToolsProtocol):
    """Closes a connection whose request head grows past MAX_UNFINISHED_BYTES."""

    _in_head = True
    _num_bytes = 0

    def data_received(self, data: bytes) -> None:
        began_before = self._in_head
        super().data_received(data)
        if not (began_before and self._in_head) or self.transport.is_closing():
            return
        self._num_bytes += len(data)  # what came in one piece with the end of another request does not count
        if self._num_bytes > MAX_UNFINISHED_BYTES:
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head, self._num_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
