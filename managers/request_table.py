"""The live requests of a tokenizer manager, by rid and by the client's rid that they were made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .errors import RequestError
from .generation import Generation
from .request_plan import RequestPlan
from .request_track import RequestTrack


@dataclass(slots=True)
class Choice:
    """One live rid. It stays here until its finishing row arrives, even if its consumer has gone: a rid is not reused before."""

    generation: Generation
    index: int
    families: set[str]  # names of the client's that mean it, besides its own
    sent: bool = False  # to the scheduler
    resent: bool = False  # its first scheduler died before it had answered
    aborted: bool = False
    track: RequestTrack = field(default_factory=lambda: RequestTrack(""))


class RequestTable:
    """rid -> Choice."""

    def __init__(self) -> None:
        self._choices: dict[str, Choice] = {}
        self._families: dict[str, set[str]] = {}  # the client's rid -> rids

    def __len__(self) -> int:
        return len(self._choices)

    def add(self, plan: RequestPlan, generation: Generation) -> None:
        """Enter all rids of a request, or none: RequestError if a name is taken."""
        for name in {*plan.rids, *plan.families}:
            if name in self._choices or name in self._families:
                raise RequestError(f"rid: {name!r} is in use by a request that runs.", param="rid")
        for index, (rid, family) in enumerate(zip(plan.rids, plan.families, strict=True)):
            self._choices[rid] = Choice(generation, index, set(), track=RequestTrack(rid))
            self._join(family, rid)

    def follow(self, followers: Mapping[str, list[str]]) -> None:
        """These rids are computed only by way of others: from now on such a rid is a name of those."""
        for rid, carriers in followers.items():
            choice = self._choices.get(rid)
            self.remove(rid)
            for carrier in carriers:
                if (other := self._choices.get(carrier)) is not None:
                    other.aborted |= choice is not None and choice.aborted
                    self._join(rid, carrier)

    def _join(self, family: str, rid: str) -> None:
        self._families.setdefault(family, set()).add(rid)
        self._choices[rid].families.add(family)

    def get(self, rid: str) -> Choice | None:
        return self._choices.get(rid)

    def remove(self, rid: str) -> None:
        """Forget a rid; unknown ones are ignored."""
        choice = self._choices.pop(rid, None)
        if choice is None:
            return
        for family in choice.families:
            siblings = self._families[family]
            siblings.discard(rid)
            if not siblings:
                del self._families[family]

    def find(self, rid: str) -> list[str]:
        """The live rids that a client means: exactly this one, or those that this one was expanded to."""
        return [rid] if rid in self._choices else sorted(self._families.get(rid, ()))

    def rids(self) -> list[str]:
        return list(self._choices)

    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    def num_routing_keys(self) -> int:
        """Different routing keys of the live requests."""
        return len({choice.track.routing_key for choice in self._choices.values()} - {""})

    def generations(self) -> Iterable[Generation]:
        """Each generation that has a live choice, once."""
        return {id(choice.generation): choice.generation for choice in self._choices.values()}.values()

    def clear(self) -> None:
        self._choices.clear()
        self._families.clear()
