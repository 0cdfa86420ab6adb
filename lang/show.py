"""A program's run as data and as a picture: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .record import COUNTS, Event, Record

if TYPE_CHECKING:
    from .interpreter import Interpreter

STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:1.5rem;color:#222;background:#fff}
h1{font-size:1.1rem}
table{border-collapse:collapse;margin-bottom:1rem}
td,th{padding:.1rem .7rem;text-align:right;border-bottom:1px solid #ddd}
.e{border-left:4px solid #bbb;margin:.25rem 0;padding:.15rem .6rem}
.e pre{margin:0;white-space:pre-wrap;font:12px/1.35 ui-monospace,monospace}
.gen{border-color:#2a7}.select{border-color:#27c}.cache{border-color:#b80}.error{border-color:#c22;color:#c22}
.m{color:#666;font-size:12px}.bar{display:inline-block;height:.6em;width:8em;background:#e55;vertical-align:middle}
.bar i{display:block;height:100%;background:#2a7}
.g{display:flex;gap:.8rem;align-items:flex-start;margin-left:1rem;border-left:1px dashed #999;padding-left:.6rem}
.g>div{flex:1;min-width:12rem}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}}
"""


@dataclass(frozen=True)
class Picture:
    """json: plain data, described in docs/language.md. html: the tree of states. Notebooks show it as it is."""

    json: dict[str, Any]
    html: str

    @staticmethod
    def of(state: Interpreter) -> Picture:
        """What the state and its forks have done so far."""
        record = state.record
        error = state.queue.error
        data = {
            "program": state.setting.program,
            "backend": state.setting.backend.name,
            "seconds": round(record.now(), 6),
            "totals": record.totals(),
            "error": None if error is None else str(error),
            **record.to_json(),
        }
        return Picture(data, _page(data, record))

    def save(self, path: str | Path) -> None:
        """Write the HTML, or the JSON where the name ends with .json. Raises ValueError for other names."""
        target = Path(path)
        if target.suffix not in (".json", ".html"):
            raise ValueError(f"{path}: the name must end with .json or .html")
        target.write_text(json.dumps(self.json, ensure_ascii=False, indent=1) if target.suffix == ".json" else self.html, "utf-8")

    def to_text(self) -> str:
        """One line per step."""
        return "\n".join(_lines(self.json, 0))

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.html)}" style="width:100%;height:30rem;border:0"></iframe>'


def _lines(node: dict[str, Any], depth: int) -> list[str]:
    lines = []
    for event in node["events"]:
        counts = " ".join(f"{name}={event[name]}" for name in COUNTS if name in event)
        lines.append(f"{'  ' * depth}{event['kind']} {event.get('label', '')} {event.get('text', '')!r} {counts}".rstrip())
        if event["kind"] == "fork":
            for child in node["forks"][event["detail"]["group"]]:
                lines += _lines(child, depth + 1)
    return lines


def _page(data: dict[str, Any], record: Record) -> str:
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in COUNTS)
    cells = "".join(f"<td>{data['totals'][name]}</td>" for name in COUNTS)
    error = "" if data["error"] is None else f'<div class="e error">{html.escape(data["error"])}</div>'
    title = f"{html.escape(data['program'])} on {html.escape(data['backend'])}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><table><tr>{head}<th>seconds</th></tr><tr>{cells}<td>{data['seconds']:.3f}</td></tr></table>"
        f"{_state(record)}{error}</html>\n"
    )


def _state(record: Record) -> str:
    parts = []
    for event in record.events:
        if event.kind == "fork":
            columns = "".join(f"<div>{_state(child)}</div>" for child in record.children[event.detail["group"]])
            parts.append(f'<div class="g">{columns}</div>')
        else:
            parts.append(_event(event))
    return "".join(parts)


def _event(event: Event) -> str:
    notes = [event.kind if event.kind != "text" else "", event.label, event.role or ""]
    if event.prompt_tokens is not None:
        share = 100 * (event.cached_tokens or 0) / max(event.prompt_tokens, 1)
        notes.append(f'<span class="bar"><i style="width:{share:.0f}%"></i></span>')
        notes.append(f"{event.cached_tokens or 0} cached, {event.computed_tokens} computed, {event.completion_tokens or 0} new")
        notes.append(f"{event.start:.3f} + {event.seconds:.3f} s")
    choices = event.detail.get("choices")
    if choices and "scores" in event.detail:
        scored = zip(choices, event.detail["scores"], strict=True)
        notes.append(html.escape("; ".join(f"{choice!r} {score:.3f}" for choice, score in scored)))
    safe = " ".join(note if note.startswith("<span") else html.escape(note, quote=False) for note in notes if note)
    return f'<div class="e {event.kind}"><div class="m">{safe}</div><pre>{html.escape(event.text)}</pre></div>'
