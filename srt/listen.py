"""The address that a server listens on: bound first of all, so that one that is taken is told at once."""

from __future__ import annotations

import errno
import socket

from ..managers.errors import StartError


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket, listening only once the server runs. Raises StartError if the address is taken or is none of ours."""
    try:
        (family, kind, proto, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartError(f"cannot listen on host {host!r}: {error.strerror or error}") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} on {host} is in use; choose another with --port") from None
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock
