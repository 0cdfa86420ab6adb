"""ScoreTree: which prompts must be computed so that continuations of one prompt can be scored, and where each score is found.

The log-probability of a token comes from the logits of the position before it, so the last token of a sequence is never computed,
and positions that sequences share are computed once. The continuations form a tree of tokens below what all of them share; each
inner node is a position whose logits are needed. A *carrier* is a path from the root to an inner node without inner nodes below it:
one prompt to compute, which tells the log-probabilities at those of its nodes that no carrier before it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .io_struct import LogprobColumns

MAX_NAMED_VALUES = 1 << 20  # log-probabilities that one carrier may tell besides those of its own tokens


@dataclass(frozen=True, slots=True)
class Carrier:
    """leader: the first item whose tokens but the last are this path; its other items end on the way. start: position of the first
    token whose log-probability it tells; the last is the one after its prompt. named: ids that its items have at these positions
    beside its own tokens."""

    leader: int
    start: int
    named: list[int]


class _Place(NamedTuple):
    """Of one log-probability: of a carrier's own tokens (column None) or of its named ids, at an offset from its start."""

    carrier: int
    offset: int
    column: int | None


class Told(NamedTuple):
    """What a carrier told: float32 [K], of its own tokens behind its K positions, and [K, len(named)]."""

    values: np.ndarray
    named: np.ndarray


@dataclass(frozen=True, slots=True)
class ScoreTree:
    """carriers, and of each item those that it needs, as indices."""

    carriers: list[Carrier]
    needs: list[list[int]]
    _places: list[list[_Place]]

    @classmethod
    def of(cls, items: Sequence[np.ndarray], start: int) -> ScoreTree | None:
        """items: token ids that are all the same before ``start`` (at least 1), each with a token there. None: a carrier would
        tell too much (MAX_NAMED_VALUES), so that the items had better be computed apart."""
        builder = _Builder([item[start:].tolist() for item in items])
        carriers = builder.carriers(start)
        widest = max(len(carrier.named) * (len(items[carrier.leader]) - carrier.start) for carrier in carriers)
        if widest > MAX_NAMED_VALUES:
            return None
        places = [builder.places(index, carriers) for index in range(len(items))]
        return cls(carriers, [sorted({place.carrier for place in own}) for own in places], places)

    def told(self, carrier: int, columns: LogprobColumns) -> Told:
        """What a carrier's only row brought."""
        values = np.frombuffer(columns.values, "<f4")
        return Told(values, np.frombuffer(columns.id_values, "<f4").reshape(len(values), len(self.carriers[carrier].named)))

    def scores(self, item: int, told: Sequence[Told | None]) -> LogprobColumns:
        """An item's log-probabilities. told: of each carrier; of those that the item needs it must be there."""
        values = np.zeros(len(self._places[item]), "<f4")
        for index, (carrier, offset, column) in enumerate(self._places[item]):
            source = told[carrier]
            if source is None:
                raise ValueError(f"carrier {carrier} has told nothing")
            values[index] = source.values[offset] if column is None else source.named[offset, column]
        return LogprobColumns(values=values.tobytes())


@dataclass(slots=True)
class _Builder:
    """Nodes are numbers, 0 the root; the depth of a node is the number of tokens on its path."""

    items: list[list[int]]
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])
    paths: list[list[int]] = field(default_factory=list)  # of each item, the nodes whose logits it needs
    owners: dict[int, tuple[int, int]] = field(default_factory=dict)  # of each node: carrier, offset
    columns: list[dict[int, int]] = field(default_factory=list)  # of each carrier: id -> its place among the named ones

    def __post_init__(self) -> None:
        for tokens in self.items:
            node, path = 0, [0]
            for token in tokens[:-1]:
                child = self.children[node].get(token)
                if child is None:
                    child = self.children[node][token] = len(self.children)
                    self.children.append({})
                node = child
                path.append(node)
            self.paths.append(path)

    def carriers(self, start: int) -> list[Carrier]:
        leaders: list[int] = []
        firsts: list[int] = []
        for index, path in enumerate(self.paths):
            if self.children[path[-1]] or path[-1] in self.owners:
                continue
            first = next(depth for depth, node in enumerate(path) if node not in self.owners)
            for offset, node in enumerate(path[first:]):
                self.owners[node] = len(leaders), offset
            leaders.append(index)
            firsts.append(first)
        self.columns = [{} for _ in leaders]
        for tokens, path in zip(self.items, self.paths, strict=True):
            for depth, (token, node) in enumerate(zip(tokens, path, strict=True)):
                carrier, _ = self.owners[node]
                if not self._is_own(leaders[carrier], depth, token):
                    self.columns[carrier].setdefault(token, len(self.columns[carrier]))
        return [
            Carrier(leader, start + first, list(named)) for leader, first, named in zip(leaders, firsts, self.columns, strict=True)
        ]

    def places(self, index: int, carriers: list[Carrier]) -> list[_Place]:
        found = []
        for depth, (token, node) in enumerate(zip(self.items[index], self.paths[index], strict=True)):
            carrier, offset = self.owners[node]
            own = self._is_own(carriers[carrier].leader, depth, token)
            found.append(_Place(carrier, offset, None if own else self.columns[carrier][token]))
        return found

    def _is_own(self, leader: int, depth: int, token: int) -> bool:
        """The token is one of the prompt of the carrier that this item leads."""
        path = self.items[leader]
        return depth < len(path) - 1 and path[depth] == token
