"""What the prefix cache holds and why a prompt hits or misses it, for people. Pure functions over a RadixTree: nothing changes.

A call looks at a fixed number of nodes at most, however large the tree is; where that was not enough, the answer says so.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .prefix_cache import CacheKey
from .radix_tree import TOKEN_BYTES, Node, RadixTree

N = TypeVar("N", bound=Node)

MAX_NODES = 4096  # nodes that one call looks at
MAX_CHILDREN = 64  # children of one node that are looked at
HEAD_TOKENS, TAIL_TOKENS = 80, 200
CONTEXT_TOKENS = 24  # shown on either side of a departure
LOOK_AHEAD = 256  # tokens behind a departure that are searched for agreement
MAX_SHIFT = 32  # tokens on either side that a difference may take
MIN_AGREEMENT = 8  # tokens in a row that count as agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """A cached prefix. hits: requests that had all of it. last_use: 0 for the one used last among those of the same report.

    head, tail: its first HEAD_TOKENS and last TAIL_TOKENS token ids; None if the prefix belongs to a namespace that a client named.
    """

    num_tokens: int
    hits: int
    in_use: bool
    last_use: int
    head: list[int] | None
    tail: list[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Where a prompt leaves the nearest cached sequence: token ``at`` is the first that differs.

    Token ids: ``before`` the shared ones, then those of the prompt and of the cached sequence. If the two agree again soon,
    ``agree_again`` counts the tokens of that agreement (as far as it was followed) and ``prompt_extra``, ``cached_extra`` the
    tokens between.
    """

    at: int
    before: list[int]
    prompt: list[int]
    cached: list[int]
    agree_again: int = 0
    prompt_extra: int = 0
    cached_extra: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt of num_tokens would find would_hit of them in the cache.

    Of the other namespaces only a count is told: how many of those looked at would give more. Namespaces with a cache_salt are
    not looked at, since their owners asked not to be probed. complete: the tree was not too large to look at all there is.
    """

    num_tokens: int
    would_hit: int
    reason: str
    nearest: Departure | None
    namespaces_seen: int
    namespaces_better: int
    complete: bool


class _Budget:
    """Nodes that may still be looked at."""

    def __init__(self) -> None:
        self.left = MAX_NODES
        self.complete = True

    def children(self, nodes: Mapping[Any, N], sample: int | None = None) -> Iterator[N]:
        """The first of these nodes, as many as the budget allows; with ``sample`` so many will do."""
        wanted = len(nodes) if sample is None else min(len(nodes), sample)
        allowed = min(self.left, wanted)
        self.complete &= allowed == wanted
        self.left -= allowed
        return itertools.islice(nodes.values(), allowed)


def hottest(tree: RadixTree, k: int) -> tuple[list[HotPrefix], bool]:
    """The k prefixes that most requests had, of equals the longer; and whether all that could be among them were looked at.

    A prefix all of whose requests went on in the same way is not listed beside its continuation. Since a request that has a node
    has its ancestors, a search from the roots that follows the hottest node first finds them in order.
    """
    budget = _Budget()
    order = itertools.count()
    heap: list[tuple[int, int, int, Node, bytes, bool]] = []

    def push(node: Node, length: int, head: bytes, is_open: bool) -> None:
        if len(head) < HEAD_TOKENS * TOKEN_BYTES:
            head = (head + node.tokens)[: HEAD_TOKENS * TOKEN_BYTES]
        heapq.heappush(heap, (-node.hits, -length - len(node.slots), next(order), node, head, is_open))

    budget.complete = len(tree.roots) <= MAX_NODES // 2
    for root in budget.children(tree.roots, MAX_NODES // 2):
        key = root.cache_key
        for node in budget.children(root.children):
            push(node, 0, b"", not key.extra_key and not key.cache_salt)
    found: list[tuple[Node, int, bytes, bool]] = []
    while heap and len(found) < k:
        _, minus_length, _, node, head, is_open = heapq.heappop(heap)
        goes_on = False
        for child in budget.children(node.children):
            goes_on |= child.hits >= node.hits
            push(child, -minus_length, head, is_open)
        if not goes_on:
            found.append((node, -minus_length, head, is_open))
    uses = sorted(found, key=lambda item: (item[0].lock_ref == 0, -item[0].used))
    ranks = {id(item[0]): rank for rank, item in enumerate(uses)}
    prefixes = [
        HotPrefix(
            num_tokens=length,
            hits=node.hits,
            in_use=node.lock_ref > 0,
            last_use=ranks[id(node)],
            head=_ids(head) if is_open else None,
            tail=_ids(_tail(node)) if is_open else None,
        )
        for node, length, head, is_open in found
    ]
    return prefixes, budget.complete


def explain(tree: RadixTree, key: CacheKey, token_ids: np.ndarray) -> Explanation:
    """Why a prompt (int32 [n], n > 0) in the namespace ``key`` would hit what it would hit."""
    budget = _Budget()
    data = tree.data_of(token_ids[:-1])  # the last token is computed in any case: its logits are wanted
    node, common, hit = _walk(tree, key, data, budget)
    nearest, departs = None, False
    if node is not None:
        nearest, departs = _departure(node, common, hit, token_ids, budget)
    seen = better = 0
    for other in itertools.islice(tree.roots, MAX_CHILDREN):
        if other != key and not other.cache_salt:
            seen += 1
            better += _walk(tree, other, data, budget)[2] > hit
    return Explanation(
        num_tokens=len(token_ids),
        would_hit=hit,
        reason=_reason(tree.page_size, len(token_ids), hit, nearest, departs=departs),
        nearest=nearest,
        namespaces_seen=seen,
        namespaces_better=better,
        complete=budget.complete and len(tree.roots) <= MAX_CHILDREN,
    )


def _walk(tree: RadixTree, key: CacheKey, data: bytes, budget: _Budget) -> tuple[Node | None, int, int]:
    """The last node that a lookup passes (the root if none, None without one), its tokens that agree, and all that agree."""
    node: Node | None = tree.roots.get(key)
    common = hit = 0
    for child, size in tree.path(key, data):
        if budget.left <= 0:
            budget.complete = False
            break
        budget.left -= 1
        node, common = child, size
        hit += size
    return node, common, hit


def _departure(node: Node, common: int, hit: int, token_ids: np.ndarray, budget: _Budget) -> tuple[Departure | None, bool]:
    """Where the prompt leaves what is cached behind ``common`` tokens of node; and whether it differs there.

    It does not where either of the two just ends; (None, False) if nothing is cached behind that place.
    """
    rest = np.asarray(token_ids[hit : hit + LOOK_AHEAD], np.int32)
    if common < len(node.slots):
        ways = [_continuation(node, common, budget)]
    else:
        hot = heapq.nlargest(MAX_CHILDREN // 4, budget.children(node.children, 4 * MAX_CHILDREN), key=lambda child: child.hits)
        ways = [_continuation(child, 0, budget) for child in hot]
    best: Departure | None = None
    for way in ways:
        same = _common(rest, way)
        departure = _compare(token_ids, hit + same, way[same:])
        if best is None or (departure.at, departure.agree_again) > (best.at, best.agree_again):
            best = departure
    return best, best is not None and bool(best.prompt) and bool(best.cached)


def _compare(token_ids: np.ndarray, at: int, cached: np.ndarray) -> Departure:
    prompt = np.asarray(token_ids[at : at + LOOK_AHEAD], np.int32)
    prompt_extra, cached_extra, agree_again = _agreement(prompt, cached)
    return Departure(
        at=at,
        before=token_ids[max(at - CONTEXT_TOKENS, 0) : at].tolist(),
        prompt=prompt[:CONTEXT_TOKENS].tolist(),
        cached=cached[:CONTEXT_TOKENS].tolist(),
        agree_again=agree_again,
        prompt_extra=prompt_extra,
        cached_extra=cached_extra,
    )


def _agreement(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int]:
    """The least (i, j), up to MAX_SHIFT each, from which a[i:] and b[j:] agree for MIN_AGREEMENT tokens or more, and how many."""
    size = MIN_AGREEMENT
    starts: dict[bytes, int] = {}
    for j in range(min(MAX_SHIFT, len(b) - size) + 1):
        starts.setdefault(b[j : j + size].tobytes(), j)
    shifts = [
        (i + j, i, j) for i in range(min(MAX_SHIFT, len(a) - size) + 1) if (j := starts.get(a[i : i + size].tobytes(), -1)) >= 0
    ]
    if not shifts:
        return 0, 0, 0
    _, i, j = min(shifts)
    return i, j, _common(a[i:], b[j:])


def _common(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


def _continuation(node: Node, start: int, budget: _Budget) -> np.ndarray:
    """Up to LOOK_AHEAD cached tokens behind the first ``start`` of node, where it branches those of the hottest child."""
    parts, size = [node.tokens[start * TOKEN_BYTES :]], len(node.slots) - start
    while size < LOOK_AHEAD and node.children:
        hot = max(budget.children(node.children, MAX_CHILDREN // 4), key=lambda child: child.hits, default=None)
        if hot is None:
            break
        node = hot
        parts.append(node.tokens)
        size += len(node.slots)
    return np.frombuffer(b"".join(parts), np.int32)[:LOOK_AHEAD]


def _tail(node: Node) -> bytes:
    """The last TAIL_TOKENS tokens of the prefix that ends with node."""
    parts: list[bytes] = []
    size = 0
    at: Node | None = node
    while at is not None and size < TAIL_TOKENS * TOKEN_BYTES:
        parts.append(at.tokens)
        size += len(at.tokens)
        at = at.parent
    return b"".join(reversed(parts))[-TAIL_TOKENS * TOKEN_BYTES :]


def _ids(data: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(data, np.int32).tolist()
    return ids


def _reason(page_size: int, num_tokens: int, hit: int, nearest: Departure | None, *, departs: bool) -> str:
    if hit == num_tokens - 1:
        return "All but the last token is cached, and the last is always computed."
    if nearest is None:
        return f"Nothing is cached behind these {hit} tokens." if hit else "Nothing is cached in this namespace."
    pages = f"; whole pages of {page_size} tokens are shared, so {hit} of them are" if hit < min(nearest.at, num_tokens - 1) else ""
    if not departs:
        end = "The prompt ends" if not nearest.prompt else "What is cached ends"
        return f"{end} after {nearest.at} tokens that agree{pages}."
    text = f"The prompt departs from the nearest cached prefix at token {nearest.at}{pages}."
    if nearest.agree_again:
        text += (
            f" The two agree again after {nearest.prompt_extra} tokens of the prompt and {nearest.cached_extra} cached ones, for "
            f"{nearest.agree_again} tokens or more, but only a common beginning can be reused."
        )
    return text
