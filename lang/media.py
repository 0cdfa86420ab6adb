"""Pictures as the URLs that servers take."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

_MAGIC = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


def as_data_uri(source: Any) -> str:
    """A URL as it is; a path, bytes or an object with PIL's ``save`` as a data URI.

    Raises OSError for a file that cannot be read, TypeError or ValueError for what is no picture.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return source
    if isinstance(source, (str, Path)):
        data = Path(source).read_bytes()
    elif isinstance(source, bytes):
        data = source
    elif hasattr(source, "save"):
        buffer = io.BytesIO()
        source.save(buffer, format="PNG")
        data = buffer.getvalue()
    else:
        raise TypeError(f"an image is a path, a URL, bytes or a PIL image, not {type(source).__name__}")
    kinds = [kind for magic, kind in _MAGIC if data.startswith(magic)]
    if not kinds:
        raise ValueError("an image must be PNG, JPEG, GIF or WebP")
    return f"data:image/{kinds[0]};base64,{base64.b64encode(data).decode()}"
