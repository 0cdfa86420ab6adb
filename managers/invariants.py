"""The books of the slots: every slot is free, or in the tree, or in a request's row. Checked when idle and in every test."""

from __future__ import annotations

import logging

from .prefill_planner import Memory

logger = logging.getLogger(__name__)


class MemoryBreach(RuntimeError):
    """Slots were lost or are owned twice."""


def balance(memory: Memory) -> dict[str, int]:
    """Tokens by owner, private ones in whole pages."""
    page_size, table = memory.allocator.page_size, memory.table
    private = 0
    for req in table.seated():
        own = int(table.kv_lens[req.row]) - req.held().length
        private += -(-own // page_size) * page_size
    return {
        "free": memory.allocator.available,
        "evictable": memory.cache.evictable_size,
        "protected": memory.cache.protected_size,
        "private": private,
        "total": memory.allocator.num_slots,
    }


def breaches(memory: Memory) -> list[str]:
    """What is wrong with the books, one line each. Only seated requests, sessions and pins lock anything of the cache."""
    books = balance(memory)
    owned = books["free"] + books["evictable"] + books["protected"] + books["private"]
    seated = len(memory.table.seated())
    num_rows, free_rows = len(memory.table.reqs) - 1, memory.table.pool.available
    problems = []
    if owned != books["total"]:
        problems.append(f"slots do not balance: {books}")
    holds = [*memory.holds.holds, *memory.pins.holds, *(req.held() for req in memory.table.seated())]
    if books["protected"] != (held := memory.cache.held_tokens(holds)):
        problems.append(f"{books['protected']} cached tokens are locked, but requests, sessions and pins hold {held}")
    if free_rows + seated != num_rows:
        problems.append(f"rows do not balance: {free_rows} free + {seated} seated != {num_rows}")
    return problems


def check_memory(memory: Memory, *, strict: bool) -> None:
    """Raise MemoryBreach if the books do not balance and strict is set.

    Otherwise log it, and if no request is seated start the books anew: an empty cache and every slot free.
    """
    problems = breaches(memory)
    if not problems:
        return
    text = "; ".join(problems)
    if strict:
        raise MemoryBreach(text)
    logger.error("memory invariant broken: %s", text)
    if not memory.table.seated():
        memory.holds.forget()
        memory.pins.forget()
        memory.cache.forget()
        memory.allocator.reset()
        logger.error("the prefix cache was emptied and every slot is free again")
