"""What a transport knows of the call under way, for whoever needs it further in: an id and the caller's trace."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from .generation import GenerateInput


@dataclass(slots=True)
class RequestContext:
    """given: the id is the client's own, so it may not be unique."""

    id: str
    given: bool = False
    traceparent: str = ""
    routing_key: str = ""  # for a request that has none of its own
    used: bool = False

    def complete(self, request: GenerateInput) -> None:
        """Give a request that has no name or no routing key those of its call."""
        if request.rid is None:
            request.rid = self.take_rid()
        if request.routing_key is None:
            request.routing_key = self.routing_key or None

    def take_rid(self) -> str | None:
        """The id as the name of a request, once, if it is unique."""
        if self.given or self.used:
            return None
        self.used = True
        return self.id


_current: ContextVar[RequestContext | None] = ContextVar("banyan_request", default=None)


def set_context(context: RequestContext) -> None:
    """From here on this task, and what it starts, works for that request."""
    _current.set(context)


def current_context() -> RequestContext | None:
    """The call under way; None outside of one."""
    return _current.get()
