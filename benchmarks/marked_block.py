"""Tables that a benchmark writes into a page, between two marks that carry its name."""

from __future__ import annotations

from pathlib import Path


def write_block(path: Path, name: str, text: str) -> None:
    """Put the text between the marks of ``name``. Raises ValueError if the file has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no block between {begin} and {end}")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")
