"""PrefixWatch: keeps the match lengths of many token sequences up to date, at a cost that grows with what changes.

A watched sequence is filed under the place where its lookup ends: a node and the page it wanted next, or the inside of a node. The
tree tells which places change; only the sequences filed there are looked up again, when somebody asks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from .prefix_cache import CacheKey
from .radix_tree import TOKEN_BYTES, Node, RadixTree, Root

Place = Node | CacheKey  # a root is named by its key: it vanishes with its last child


@dataclass(slots=True, eq=False)
class _Watched:
    key: CacheKey
    data: bytes
    length: int  # tokens that match
    place: Place
    page: bytes | None  # the page that the lookup missed at the end of ``place``; None: it ended inside


class PrefixWatch:
    """Sequences are named by integers that the caller chooses."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        tree.observer = self
        self._watched: dict[int, _Watched] = {}
        self._at_end: defaultdict[Place, dict[bytes, set[int]]] = defaultdict(dict)
        self._inside: defaultdict[Place, set[int]] = defaultdict(set)
        self._stale: set[int] = set()

    def add(self, name: int, key: CacheKey, token_ids: np.ndarray) -> int:
        """Watch a sequence; returns how many of its tokens match now."""
        self._watched[name] = watched = _Watched(key, self._tree.data_of(token_ids), 0, key, None)
        self._look_up(name, watched)
        return watched.length

    def discard(self, name: int) -> None:
        """Stop watching a sequence."""
        self._unfile(name, self._watched.pop(name))
        self._stale.discard(name)

    def refresh(self) -> dict[int, int]:
        """Look up again what may have changed; new match lengths by name, of those that did."""
        changed = {}
        for name in self._stale:
            watched = self._watched[name]
            before = watched.length
            self._look_up(name, watched)
            if watched.length != before:
                changed[name] = watched.length
        self._stale.clear()
        return changed

    def ends(self) -> dict[int, Node | None]:
        """By name, the node in which each up-to-date lookup ends; None at a root."""
        return {name: watched.place if isinstance(watched.place, Node) else None for name, watched in self._watched.items()}

    def rebind(self, tree: RadixTree) -> None:
        """The tree was replaced by another: everything is stale."""
        self._tree = tree
        tree.observer = self
        self._at_end.clear()
        self._inside.clear()
        self._stale = set(self._watched)

    # --- Observer

    def attached(self, parent: Node, page: bytes) -> None:
        place: Place = parent.cache_key if isinstance(parent, Root) else parent
        waiting = self._at_end.get(place)
        if waiting:
            self._stale |= waiting.get(page, set())

    def changed(self, node: Node) -> None:
        for names in self._at_end.get(node, {}).values():
            self._stale |= names
        self.split(node)

    def split(self, node: Node) -> None:
        self._stale |= self._inside.get(node, set())

    # --- filing

    def _look_up(self, name: int, watched: _Watched) -> None:
        """Find where the sequence's lookup ends and file it there."""
        self._unfile(name, watched)
        length, whole = 0, True
        end: Place = watched.key
        for node, common in self._tree.path(watched.key, watched.data):
            length += common
            end, whole = node, common == len(node.slots)
        watched.length, watched.place = length, end
        at = length * TOKEN_BYTES
        watched.page = watched.data[at : at + self._tree.page_size * TOKEN_BYTES] if whole else None
        if watched.page is None:
            self._inside[end].add(name)
        else:
            self._at_end[end].setdefault(watched.page, set()).add(name)

    def _unfile(self, name: int, watched: _Watched) -> None:
        if watched.page is None:
            names = self._inside.get(watched.place, set())
            names.discard(name)
            if not names:
                self._inside.pop(watched.place, None)
            return
        pages = self._at_end.get(watched.place, {})
        names = pages.get(watched.page, set())
        names.discard(name)
        if not names:
            pages.pop(watched.page, None)
        if not pages:
            self._at_end.pop(watched.place, None)
