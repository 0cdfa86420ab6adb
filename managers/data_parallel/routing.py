"""Which replica gets a request. Pure: what it knows is what the controller has sent and what has ended.

All methods pass over replicas that are down, and let ties rotate, so that idle replicas take turns.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

METHODS = ("round_robin", "total_requests", "total_tokens", "cache_aware", "follow_bootstrap_room")
BLOCK = 16  # tokens that the approximate tree knows as one
MAX_BLOCKS = 1 << 18  # of a replica
MEMORY = 32  # requests of a replica after which what it was sent to compute counts 1/e
BALANCE = 0.04  # of the tokens that a replica was sent more than another of late


@dataclass(slots=True)
class Pending:
    """A request that was sent to a replica and has not ended. tokens: what it may still cost there."""

    replica: int
    tokens: int
    num_prompt: int


@dataclass(slots=True)
class Load:
    """What the router knows of a replica."""

    alive: bool = True
    requests: int = 0
    tokens: int = 0
    recent_tokens: float = 0.0  # what it was sent to compute, older requests counting less and less


class PrefixMap:
    """For each replica an approximate radix tree of the prompts that it was sent, and that its cache may still hold.

    A block's key is a hash of all tokens up to its end, so the keys of a prompt are a path. A replica's tree is as large as its
    cache, and as there the least recently used blocks go first, the end of a path before its beginning.
    """

    def __init__(self, num_replicas: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._trees: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_replicas)]

    def __len__(self) -> int:
        return sum(len(tree) for tree in self._trees)

    def keys(self, namespace: str, input_ids: bytes) -> list[bytes]:
        """The path of a prompt (int32 ids as bytes), whole blocks only."""
        digest = hashlib.blake2b(namespace.encode(), digest_size=12).digest()
        path = []
        for start in range(0, len(input_ids) - 4 * BLOCK + 1, 4 * BLOCK):
            digest = hashlib.blake2b(input_ids[start : start + 4 * BLOCK], key=digest, digest_size=12).digest()
            path.append(digest)
        return path

    def matched(self, path: Sequence[bytes]) -> list[int]:
        """Tokens of the path that each replica was sent before."""
        return [BLOCK * next((count for count, key in enumerate(path) if key not in tree), len(path)) for tree in self._trees]

    def add(self, path: Sequence[bytes], replica: int) -> None:
        """The replica is sent this path."""
        tree = self._trees[replica]
        for key in reversed(path):
            tree[key] = None
            tree.move_to_end(key)
        while len(tree) > self._max_blocks:
            tree.popitem(last=False)

    def forget(self, replica: int) -> None:
        """The replica has lost its cache."""
        self._trees[replica].clear()


@dataclass(slots=True)
class Router:
    """Chooses replicas and counts what they have to do. cache_tokens: what the cache of one holds."""

    method: str
    replicas: list[Load]
    cache_tokens: InitVar[int] = MAX_BLOCKS * BLOCK
    prefixes: PrefixMap = field(init=False)
    pending: dict[str, Pending] = field(default_factory=dict)
    _last: int = -1

    def __post_init__(self, cache_tokens: int) -> None:
        self.prefixes = PrefixMap(len(self.replicas), min(cache_tokens // BLOCK, MAX_BLOCKS))

    def route(
        self, rid: str, input_ids: bytes, max_new_tokens: int, *, namespace: str = "", pinned: int | None = None
    ) -> int | None:
        """The replica of a request, which counts as sent to it; None if the one that it is pinned to, or every one, is down."""
        num_prompt = len(input_ids) // 4
        path = self.prefixes.keys(namespace, input_ids) if self.method == "cache_aware" else []
        matched = self.prefixes.matched(path)
        chosen = self._choose(matched) if pinned is None else pinned
        if chosen is None or not self.replicas[chosen].alive:
            return None
        self._last = chosen if pinned is None else self._last
        self.prefixes.add(path, chosen)
        replica, tokens = self.replicas[chosen], num_prompt - matched[chosen] + max_new_tokens
        self.pending[rid] = Pending(chosen, tokens, num_prompt)
        replica.requests += 1
        replica.tokens += tokens
        for other in self.replicas:
            other.recent_tokens *= 1 - 1 / (MEMORY * len(self.replicas))
        replica.recent_tokens += tokens
        return chosen

    def pinned(self, rank: int | None, room: int | None) -> int | None:
        """The replica that a request names, by its rank or else by its room."""
        if rank is None and room is not None and self.method == "follow_bootstrap_room":
            return room % len(self.replicas)
        return rank

    def _choose(self, matched: list[int]) -> int | None:
        costs: dict[str, Callable[[int], int]] = {
            "round_robin": lambda index: 0,
            "follow_bootstrap_room": lambda index: 0,  # of a request without a room
            "total_requests": lambda index: self.replicas[index].requests,
            "total_tokens": lambda index: self.replicas[index].tokens,
            # what it has to do before, what of the prompt it would have to compute, and a share of what it did more than others: a
            # prefix that all want, such as a system prompt, must not gather everybody where it was seen first
            "cache_aware": lambda index: (
                self.replicas[index].tokens - matched[index] + int(BALANCE * self.replicas[index].recent_tokens)
            ),
        }
        cost, size = costs[self.method], len(self.replicas)
        alive = [index for index in range(size) if self.replicas[index].alive]
        return min(alive, key=lambda index: (cost(index), (index - self._last - 1) % size), default=None)

    def ended(self, rid: str) -> None:
        """A request has ended; unknown ones are none of the router's."""
        pending = self.pending.pop(rid, None)
        if pending:
            replica = self.replicas[pending.replica]
            replica.requests -= 1
            replica.tokens -= pending.tokens

    def down(self, index: int) -> dict[str, Pending]:
        """The replica is lost, with these requests."""
        lost = {rid: pending for rid, pending in self.pending.items() if pending.replica == index}
        for rid in lost:
            self.ended(rid)
        self.replicas[index].alive = False
        self.prefixes.forget(index)
        return lost

    def up(self, index: int) -> None:
        """The replica is back, with an empty cache."""
        self.replicas[index].alive = True
