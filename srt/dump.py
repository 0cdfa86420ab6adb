"""``banyan dump``: what a running server does, into a folder, for a report of a fault."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from .plain_http import Server, fetch


def write_dump(server: Server, folder: str | None) -> Path:
    """Write stacks-*.txt, state.json, health.json, turns.jsonl, server_info.json and metrics.txt; the folder's path.

    No prompts and no outputs are in it, unless the server runs with --record-prompts. Raises StartError if no server answers.
    """
    target = Path(folder or f"banyan-dump-{time.strftime('%Y%m%d-%H%M%S')}")
    dump: dict[str, Any] = json.loads(fetch(server, "/dump", post=True))
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in dump.get("stacks", {}).items():
        _write(target / f"stacks-{name}.txt", text)
    _write(target / "health.json", json.dumps(dump["health"], indent=1))
    _write(target / "state.json", json.dumps(dump["state"], indent=1))
    if dump["turns"] is not None:
        _write(target / "turns.jsonl", "".join(line + "\n" for line in dump["turns"]))
    for name, path in (("server_info.json", "/server_info"), ("metrics.txt", "/metrics")):
        text = fetch(server, path, missing="")
        if text:
            _write(target / name, text)
    return target


def _write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
