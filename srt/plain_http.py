"""A few bytes over HTTP for the tools of the command line, with the standard library alone."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import NamedTuple

from ..managers.errors import StartError

TIMEOUT = 30.0  # seconds


class Server(NamedTuple):
    """Where it listens, and the key that it wants, if it wants one."""

    url: str
    key: str | None = None


def fetch(server: Server, path: str, *, post: bool = False, missing: str | None = None) -> str:
    """The body of a reply. Raises StartError for no answer, and for an error status unless ``missing`` stands for it."""
    url = server.url.rstrip("/")
    request = urllib.request.Request(url + path, data=b"" if post else None, method="POST" if post else "GET")
    if server.key:
        request.add_header("Authorization", f"Bearer {server.key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            body: bytes = reply.read()
    except urllib.error.HTTPError as error:
        if missing is not None:
            return missing
        raise StartError(f"{url}{path} answers {error.code}: {error.read(300).decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise StartError(f"no server answers at {url}: {getattr(error, 'reason', error)}") from None
    return body.decode()
