"""Token-keyed radix tree of slots: match, split, attach, lock, leaves. It never allocates or frees a slot.

An edge holds the tokens between a node and its parent, as the bytes of an int32 array: comparing two spans is one memcmp, and
the first page of an edge is its key in the parent's dict. Every edge is a whole number of pages; a node is split only while a
path is locked, never by a lookup. Nodes own their tokens and slots: a view would keep the array it was cut from alive.

Invariants (RadixTree.check):
- lock_ref of a node = number of holds on it or below it; so it never grows from parent to child;
- evictable_size = tokens of nodes with lock_ref 0, protected_size = tokens of the others;
- a root without children does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from .prefix_cache import CacheKey, PrefixMatch

TOKEN_BYTES = 4


class Node:
    """One edge of the tree and the slots of its tokens. ``prev``, ``next`` and ``entry`` belong to the eviction order."""

    __slots__ = (
        "children",
        "created",
        "entry",
        "hits",
        "lock_ref",
        "next",
        "parent",
        "prev",
        "priority",
        "slots",
        "tokens",
        "used",
    )

    def __init__(self, parent: Node | None, tokens: bytes, slots: np.ndarray) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[bytes, Node] = {}
        self.lock_ref = 0
        self.hits = 0  # requests that had these tokens
        self.priority = 0  # the highest of these requests
        self.created = 0  # logical clock of the tree
        self.used = 0  # logical clock of the order, set when the last lock goes
        self.prev: Node | None = None
        self.next: Node | None = None
        self.entry = 0


class Root(Node):
    """The top of the tokens of one CacheKey; an empty edge, never locked."""

    __slots__ = ("cache_key",)

    def __init__(self, cache_key: CacheKey) -> None:
        super().__init__(None, b"", np.empty(0, np.int32))
        self.cache_key = cache_key


class EvictionOrder(Protocol):
    """Which unlocked leaf goes first. Told of every change of the tree that can matter to it.

    Not of splits: the upper part of a split is locked from birth, the lower keeps its place.
    """

    def add(self, node: Node) -> None:
        """node lost its last lock, just now; its descendants were added before."""

    def discard(self, node: Node) -> None:
        """node, unlocked until now, was locked or cut off."""

    def expose(self, node: Node) -> None:
        """node, unlocked, lost its last child."""

    def victim(self) -> Node | None:
        """The unlocked leaf that goes next, None if there is none. Changes nothing."""

    def check(self, unlocked: list[Node]) -> None:
        """Raise RuntimeError unless the order holds exactly what it should, given all unlocked nodes."""


class Observer(Protocol):
    """Told of the changes that can make a lookup end elsewhere."""

    def attached(self, parent: Node, page: bytes) -> None:
        """parent has a new child whose first page is ``page``."""

    def changed(self, node: Node) -> None:
        """node, a leaf, lost its last tokens or all of them."""

    def split(self, node: Node) -> None:
        """node now holds only the last tokens of its edge, which ends where it ended."""


class Descent(NamedTuple):
    """Where a descent ended: the node (start itself if nothing matched), and the slots of the tokens passed [n]."""

    node: Node
    slots: np.ndarray


class RadixTree:
    """The trees of all cache keys, over one eviction order. Lengths in tokens; ``data`` is always whole pages of int32 bytes."""

    __slots__ = (
        "_clock",
        "_order",
        "_page_bytes",
        "evictable_size",
        "num_nodes",
        "observer",
        "page_size",
        "protected_size",
        "roots",
    )

    def __init__(self, page_size: int, order: EvictionOrder) -> None:
        self.page_size = page_size
        self.roots: dict[CacheKey, Root] = {}
        self.evictable_size = 0
        self.protected_size = 0
        self.num_nodes = 0
        self.observer: Observer | None = None
        self._page_bytes = page_size * TOKEN_BYTES
        self._order = order
        self._clock = 0

    def data_of(self, token_ids: np.ndarray, start: int = 0) -> bytes:
        """The whole pages of token_ids[start:], as the bytes that the other methods take."""
        end = len(token_ids) // self.page_size * self.page_size
        return np.asarray(token_ids[start:end], dtype=np.int32).tobytes()

    def match(self, key: CacheKey, data: bytes) -> PrefixMatch:
        """Longest prefix of data below the root of key; changes nothing."""
        length = pinned = 0
        for node, common in self.path(key, data):
            length += common
            if node.lock_ref == 0:
                pinned += common
        return PrefixMatch(length, pinned)

    def path(self, key: CacheKey, data: bytes) -> Iterator[tuple[Node, int]]:
        """The nodes that a lookup of data passes below the root of key, and how many tokens agree in each; changes nothing."""
        node: Node | None = self.roots.get(key)
        at = 0
        while node is not None:
            child, common = self._step(node, data, at)
            if child is None:
                return
            yield child, common
            at += common * TOKEN_BYTES
            node = child if common == len(child.slots) else None

    def root_of(self, key: CacheKey) -> Root:
        """The root of key, made if it does not exist; the caller attaches something to a new one."""
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Root(key)
        return root

    def descend(self, start: Node, data: bytes, *, hits: int = 1) -> Descent:
        """Follow data from start as far as it is known and lock each node passed, start excluded; splits the last if need be.

        start must be a root or locked: then a lock held on start has moved to the end of the path. Counts ``hits`` requests for
        each node passed.
        """
        node, at = start, 0
        parts: list[np.ndarray] = []
        while True:
            child, common = self._step(node, data, at)
            if child is None:
                break
            if common < len(child.slots):
                child = self._split(child, common)
            elif child.lock_ref == 0:
                self._order.discard(child)
            if child.lock_ref == 0:
                self.evictable_size -= common
                self.protected_size += common
            child.lock_ref += 1
            child.hits += hits
            parts.append(child.slots)
            node = child
            at += common * TOKEN_BYTES
        return Descent(node, np.concatenate(parts) if parts else np.empty(0, np.int32))

    def attach(self, parent: Node, data: bytes, slots: np.ndarray) -> Node:
        """A new leaf, locked once, below parent (a root or locked), which has no child that shares data's first page.

        A lock held on parent has moved to the leaf. data and slots are copied.
        """
        leaf = Node(parent, data, np.array(slots, dtype=np.int32))
        self._clock += 1
        leaf.created = self._clock
        leaf.lock_ref = 1
        leaf.hits = 1
        page = data[: self._page_bytes]
        parent.children[page] = leaf
        self.protected_size += len(leaf.slots)
        self.num_nodes += 1
        if self.observer:
            self.observer.attached(parent, page)
        return leaf

    def unlock(self, node: Node, priority: int = 0) -> None:
        """Drop one hold on node: one lock of each node from it up to the root, leaf first. Each gets at least that priority."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.lock_ref < 1:
                raise RuntimeError("unlock of a node that is not locked")
            at.lock_ref -= 1
            at.priority = max(at.priority, priority)
            if at.lock_ref == 0:
                self.protected_size -= len(at.slots)
                self.evictable_size += len(at.slots)
                self._order.add(at)
            at = at.parent

    def victim(self) -> Node | None:
        """The unlocked leaf that goes next, None if nothing is unlocked."""
        return self._order.victim()

    def cut(self, leaf: Node, num_tokens: int) -> np.ndarray:
        """Cut the last num_tokens (whole pages) off an unlocked leaf, all of it if there are no more; returns their slots."""
        if self.observer:
            self.observer.changed(leaf)
        self.evictable_size -= min(num_tokens, len(leaf.slots))
        if num_tokens < len(leaf.slots):
            keep = len(leaf.slots) - num_tokens
            freed = leaf.slots[keep:].copy()
            leaf.slots = leaf.slots[:keep].copy()
            leaf.tokens = leaf.tokens[: keep * TOKEN_BYTES]
            return freed
        self._order.discard(leaf)
        self.num_nodes -= 1
        parent = leaf.parent
        if parent is None:
            raise RuntimeError("a root was taken for a leaf")
        del parent.children[leaf.tokens[: self._page_bytes]]
        leaf.parent = None
        if not parent.children:
            if isinstance(parent, Root):
                del self.roots[parent.cache_key]
            elif parent.lock_ref == 0:
                self._order.expose(parent)
        return leaf.slots

    def nodes(self) -> Iterator[Node]:
        """Every node except the roots, each after its parent."""
        stack: list[Node] = list(self.roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check(self) -> None:
        """Raise RuntimeError with a description if an invariant of the tree or its order is broken."""
        for key, root in self.roots.items():
            if root.cache_key != key or not root.children or root.lock_ref:
                raise RuntimeError(f"root {key}: wrong key, no children or locked")
        evictable = protected = count = 0
        unlocked: list[Node] = []
        for node in self.nodes():
            self._check_node(node)
            count += 1
            if node.lock_ref:
                protected += len(node.slots)
            else:
                evictable += len(node.slots)
                unlocked.append(node)
        found, kept = (evictable, protected, count), (self.evictable_size, self.protected_size, self.num_nodes)
        if found != kept:
            raise RuntimeError(f"(evictable, protected, nodes) are {found}, the tree says {kept}")
        self._order.check(unlocked)

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        if parent is None or parent.children.get(node.tokens[: self._page_bytes]) is not node:
            raise RuntimeError("a node is not its parent's child")
        if not len(node.slots) or len(node.slots) % self.page_size or len(node.tokens) != len(node.slots) * TOKEN_BYTES:
            raise RuntimeError(f"an edge of {len(node.slots)} slots and {len(node.tokens)} bytes, page size {self.page_size}")
        if node.slots.base is not None:
            raise RuntimeError("a node's slots are a view of another array")
        below = sum(child.lock_ref for child in node.children.values())
        if node.lock_ref < below:
            raise RuntimeError(f"a node with {node.lock_ref} locks has {below} below it")

    def _step(self, node: Node, data: bytes, at: int) -> tuple[Node | None, int]:
        """The child of node that data continues into at byte ``at``, and how many tokens (whole pages, at least one) agree."""
        child = node.children.get(data[at : at + self._page_bytes])
        if child is None:
            return None, 0
        if data.startswith(child.tokens, at):
            return child, len(child.slots)
        size = min(len(child.tokens), len(data) - at) // TOKEN_BYTES
        ours = np.frombuffer(data, np.int32, size, at)
        differs = ours != np.frombuffer(child.tokens, np.int32, size)
        first = int(differs.argmax())
        common = first if differs[first] else size
        return child, common - common % self.page_size

    def _split(self, node: Node, num_tokens: int) -> Node:
        """Give the first num_tokens of node's edge to a new parent of it, which is returned, to be locked at once.

        Handles on node stay valid: it ends where it ended.
        """
        parent = node.parent
        if parent is None:
            raise RuntimeError("a root cannot be split")
        cut = num_tokens * TOKEN_BYTES
        upper = Node(parent, node.tokens[:cut], node.slots[:num_tokens].copy())
        upper.lock_ref, upper.hits, upper.priority = node.lock_ref, node.hits, node.priority
        upper.created = node.created
        parent.children[upper.tokens[: self._page_bytes]] = upper
        node.parent = upper
        node.tokens = node.tokens[cut:]
        node.slots = node.slots[num_tokens:].copy()
        upper.children[node.tokens[: self._page_bytes]] = node
        self.num_nodes += 1
        if self.observer:
            self.observer.split(node)
        return upper
