"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Splits a stream of text into what may be shown and what may still turn out to be (part of) a stop string.

    The match that ends first wins, of those that end together the one that starts first; so the result does not depend on how the
    text was cut into pieces. Time is linear in the text: a start that was ruled out is never looked at again.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._heads = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    @property
    def matched_text(self) -> str:
        return self.matched or ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to show now, the stop string that is complete or None). After a match nothing more is shown."""
        if self.matched is not None:
            return "", self.matched
        if not text:
            return "", None
        buffer, num_old = self._held + text, len(self._held)
        matches = []
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))  # what lies in the held part alone is no match
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if matches:
            _, start, self.matched = min(matches)
            self._held = ""
            return buffer[:start], self.matched
        cut = self._possible_start(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> str:
        """The held-back tail: no stop string will be completed any more."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Where the longest tail begins that is a proper prefix of a stop string."""
        for start, char in enumerate(buffer):
            if char in self._heads:
                tail = buffer[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(buffer)
