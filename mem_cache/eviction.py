"""Which unlocked leaf goes first: lru, mru by linked lists, O(1); lfu, slru, fifo, priority by a heap, O(log n) amortised.

Time is a counter that ticks when a node loses its last lock, so all ranks order alike. Of two nodes that were last used
together the descendant is the older.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .radix_tree import EvictionOrder, Node


class _List:
    """Doubly linked list through Node.prev and Node.next, with a sentinel."""

    __slots__ = ("_end", "size")

    def __init__(self) -> None:
        self._end = Node(None, b"", np.empty(0, np.int32))
        self._end.prev = self._end.next = self._end
        self.size = 0

    def __iter__(self) -> Iterator[Node]:
        node = self._end.next
        while node is not None and node is not self._end:
            yield node
            node = node.next

    def first(self) -> Node | None:
        return self._end.next if self.size else None

    def last(self) -> Node | None:
        return self._end.prev if self.size else None

    def append(self, node: Node) -> None:
        before = self._end.prev
        if before is None or node.next is not None:
            raise RuntimeError("a node is in the eviction order twice")
        node.prev, node.next = before, self._end
        before.next = self._end.prev = node
        self.size += 1

    def remove(self, node: Node) -> None:
        before, after = node.prev, node.next
        if before is None or after is None:
            raise RuntimeError("a node is not in the eviction order")
        before.next, after.prev = after, before
        node.prev = node.next = None
        self.size -= 1


class LruOrder:
    """Least recently used first.

    All unlocked nodes are in one list, descendants always before their ancestors, since add is called leaf first. So the head is
    a leaf, and an inner node that becomes a leaf is in its place already.
    """

    __slots__ = ("_clock", "_list")

    def __init__(self) -> None:
        self._list = _List()
        self._clock = 0

    def add(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        self._list.append(node)

    def discard(self, node: Node) -> None:
        self._list.remove(node)

    def expose(self, node: Node) -> None:
        """Nothing to do."""

    def victim(self) -> Node | None:
        return self._list.first()

    def check(self, unlocked: list[Node]) -> None:
        seen: set[int] = set()
        for node in self._list:
            if any(id(child) not in seen for child in node.children.values()):
                raise RuntimeError("lru: a node stands before one of its children")
            seen.add(id(node))
        if seen != {id(node) for node in unlocked} or len(seen) != self._list.size:
            raise RuntimeError(f"lru: {len(seen)} nodes in a list of {self._list.size}, {len(unlocked)} are unlocked")


class MruOrder:
    """Most recently used first.

    The list holds the unlocked leaves, the last used at the end. A parent is used no earlier than its child, so one that
    becomes a leaf when the last of the list goes is the new last.
    """

    __slots__ = ("_clock", "_list")

    def __init__(self) -> None:
        self._list = _List()
        self._clock = 0

    def add(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        if not node.children:
            self._list.append(node)

    def discard(self, node: Node) -> None:
        if not node.children:
            self._list.remove(node)

    def expose(self, node: Node) -> None:
        self._list.append(node)

    def victim(self) -> Node | None:
        return self._list.last()

    def check(self, unlocked: list[Node]) -> None:
        nodes = list(self._list)
        if {id(node) for node in nodes} != {id(node) for node in unlocked if not node.children} or len(nodes) != self._list.size:
            raise RuntimeError("mru: the list is not the unlocked leaves")
        if any(a.used > b.used for a, b in itertools.pairwise(nodes)):
            raise RuntimeError("mru: the list is not in order of use")


class HeapOrder:
    """Smallest rank first; ties by last use, then by the order in which they became leaves.

    The heap holds an entry per unlocked leaf. A leaf that is locked or cut leaves its entry behind (Node.entry no longer
    names it); dead entries are dropped when they surface, and all at once when they outnumber the live.
    """

    __slots__ = ("_clock", "_entries", "_heap", "_live", "_rank")

    def __init__(self, rank: Callable[[Node], int]) -> None:
        self._rank = rank
        self._heap: list[tuple[int, int, int, Node]] = []
        self._clock = 0
        self._entries = 0
        self._live = 0

    def add(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        if not node.children:
            self.expose(node)

    def discard(self, node: Node) -> None:
        if node.entry:
            node.entry = 0
            self._live -= 1
            if len(self._heap) > 2 * self._live + 64:
                self._heap = [entry for entry in self._heap if entry[3].entry == entry[2]]
                heapq.heapify(self._heap)

    def expose(self, node: Node) -> None:
        self._entries += 1
        node.entry = self._entries
        self._live += 1
        heapq.heappush(self._heap, (self._rank(node), node.used, node.entry, node))

    def victim(self) -> Node | None:
        heap = self._heap
        while heap and heap[0][3].entry != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def check(self, unlocked: list[Node]) -> None:
        live = [entry for entry in self._heap if entry[3].entry == entry[2]]
        if {id(entry[3]) for entry in live} != {id(node) for node in unlocked if not node.children} or len(live) != self._live:
            raise RuntimeError("heap: the live entries are not the unlocked leaves")
        if any(entry[0] != self._rank(entry[3]) or entry[1] != entry[3].used for entry in live):
            raise RuntimeError("heap: a leaf's rank changed while it was in the heap")


def _fifo_rank(node: Node) -> int:
    return node.created


def _lfu_rank(node: Node) -> int:
    return node.hits


def _slru_rank(node: Node) -> int:
    return int(node.hits >= 2)


def _priority_rank(node: Node) -> int:
    return node.priority


_ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LruOrder,
    "mru": MruOrder,
    "fifo": lambda: HeapOrder(_fifo_rank),
    "lfu": lambda: HeapOrder(_lfu_rank),
    "slru": lambda: HeapOrder(_slru_rank),
    "priority": lambda: HeapOrder(_priority_rank),
}
EVICTION_POLICIES = tuple(_ORDERS)


def make_order(policy: str) -> EvictionOrder:
    """A new order of that name.

    lru, mru: by last use. fifo: by creation. lfu: fewest requests first. slru: nodes that only one request had go first.
    priority: the lowest priority first, where a node has the highest of its requests. Raises ValueError for other names.
    """
    try:
        return _ORDERS[policy]()
    except KeyError:
        raise ValueError(f"unknown eviction policy {policy!r}; one of {', '.join(EVICTION_POLICIES)}") from None
