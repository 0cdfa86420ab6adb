"""What a state did, step by step: the data behind ``state.show()``."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Event:
    """One step. Times are seconds since the program began; tokens are the server's counts, None where it gave none."""

    kind: str  # text, gen, select, fork, join, cache, image, error
    label: str = ""
    text: str = ""
    role: str | None = None
    start: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    computed_tokens: int | None = None
    completion_tokens: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """The events of one state, and the records of its forks: ``children[i]`` has the states that fork number i made."""

    clock: float = field(default_factory=time.monotonic)
    events: list[Event] = field(default_factory=list)
    children: list[list[Record]] = field(default_factory=list)

    def now(self) -> float:
        """Seconds since the program began."""
        return time.monotonic() - self.clock

    def text(self, text: str, role: str | None) -> None:
        """Fixed text; neighbours become one event."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind == "text" and last.role == role:
            last.text += text
        elif text:
            self.events.append(Event(kind="text", text=text, role=role, start=self.now()))

    def call(self, event: Event, metas: list[dict[str, Any]]) -> None:
        """A step that called the backend; the counts of all its requests are added up."""
        event.seconds = self.now() - event.start
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            counts = [meta[name] for meta in metas if isinstance(meta.get(name), int)]
            setattr(event, name, sum(counts) if counts else None)
        if event.prompt_tokens is not None:
            event.computed_tokens = event.prompt_tokens - (event.cached_tokens or 0)
        self.events.append(event)

    def fork(self, size: int) -> list[Record]:
        """Records for new forks."""
        made = [Record(self.clock) for _ in range(size)]
        self.events.append(Event(kind="fork", label=str(size), start=self.now(), detail={"group": len(self.children)}))
        self.children.append(made)
        return made

    def to_json(self) -> dict[str, Any]:
        """Plain data: {"events": [...], "forks": [[...], ...]}."""
        events = [{name: value for name, value in asdict(event).items() if value not in (None, "", {})} for event in self.events]
        return {"events": events, "forks": [[child.to_json() for child in group] for group in self.children]}

    def totals(self) -> dict[str, int]:
        """Sums over this state and all forks of it."""
        sums = {name: sum(getattr(event, name) or 0 for event in self.events) for name in COUNTS}
        for group in self.children:
            for child in group:
                for name, value in child.totals().items():
                    sums[name] += value
        return sums


COUNTS = ("prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens")
