"""Which KV slots are free. Slots are handed out and taken back in whole pages; all or nothing, never a partial answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class SlotAllocator:
    """Free slots page_size .. num_slots + page_size - 1, grouped into pages; page 0 is scratch and never handed out.

    Every array taken or returned is int32 and belongs to its receiver: nothing here keeps a view of a caller's array.
    A slot of a page > 1 belongs to the same owner as its whole page: the owner fills it up (alloc_extend and alloc_decode
    continue behind ``last_slots``) and frees it once. Pages are handed out in ascending order until the list runs dry; then
    what was freed meanwhile is merged in and sorted, so that long prompts get contiguous runs.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        if page_size < 1 or num_slots < page_size or num_slots % page_size:
            raise ValueError(f"num_slots ({num_slots}) must be a positive multiple of page_size ({page_size})")
        self.num_slots = num_slots
        self.page_size = page_size
        self._group_depth = 0
        self.reset()

    def reset(self) -> None:
        """Every slot is free, whoever thinks to own it."""
        num_pages = self.num_slots // self.page_size
        self._ready = np.arange(1, num_pages + 1, dtype=np.int32)  # ascending; [_head:] are free
        self._head = 0
        self._released: list[np.ndarray] = []  # free as well, not sorted in yet
        self._num_free = num_pages
        self._is_free = np.ones(num_pages + 1, dtype=np.bool_)
        self._is_free[0] = False
        self._pending: list[np.ndarray] = []  # pages freed inside a free_group, not free before it ends

    @property
    def available(self) -> int:
        """Free tokens."""
        return self._num_free * self.page_size

    def extend_cost(self, prefix_lens: np.ndarray, seq_lens: np.ndarray) -> int:
        """Tokens (whole pages) that alloc_extend with these lengths takes from ``available``."""
        if self.page_size == 1:
            return int(np.sum(seq_lens) - np.sum(prefix_lens))
        p = self.page_size
        return int(np.sum(-(-np.asarray(seq_lens) // p)) - np.sum(-(-np.asarray(prefix_lens) // p))) * p

    def decode_cost(self, seq_lens: np.ndarray) -> int:
        """Tokens (whole pages) that alloc_decode with these lengths (the new token counted) takes from ``available``."""
        if self.page_size == 1:
            return len(seq_lens)
        return int(np.count_nonzero((np.asarray(seq_lens) - 1) % self.page_size == 0)) * self.page_size

    def alloc_extend(self, prefix_lens: np.ndarray, seq_lens: np.ndarray, last_slots: np.ndarray) -> np.ndarray | None:
        """Slots for the tokens [prefix_lens[b], seq_lens[b]) of each request, in order of the requests; None when short.

        last_slots [B]: slot of token prefix_lens[b] - 1; read only where prefix_lens[b] is not a multiple of the page size.
        Returns int32 [sum(seq_lens - prefix_lens)].
        """
        prefix = np.asarray(prefix_lens, dtype=np.int64)
        extend = np.asarray(seq_lens, dtype=np.int64) - prefix
        if extend.size and extend.min() < 0:
            raise ValueError("alloc_extend: a sequence is shorter than its prefix")
        if self.page_size == 1:
            return self._take(int(extend.sum()))
        return self._alloc_extend_paged(prefix, extend, np.asarray(last_slots, dtype=np.int64))

    def _alloc_extend_paged(self, prefix: np.ndarray, extend: np.ndarray, last_slots: np.ndarray) -> np.ndarray | None:
        p = self.page_size
        first_new = -(-prefix // p)  # index, within its request, of the first page that is new
        num_new = -(-(prefix + extend) // p) - first_new
        pages = self._take(int(num_new.sum()))
        if pages is None:
            return None
        total = int(extend.sum())
        starts = np.cumsum(extend) - extend
        position = np.arange(total, dtype=np.int64) + np.repeat(prefix - starts, extend)
        # Token at position i of a request lies in its page i // p. Pages before first_new: the one partly used page.
        page_starts = np.cumsum(num_new) - num_new
        nth = position // p + np.repeat(page_starts - first_new, extend)
        in_new = position >= np.repeat(first_new * p, extend)
        slots: np.ndarray = position + np.repeat(last_slots - (prefix - 1), extend)
        slots[in_new] = pages[nth[in_new]].astype(np.int64) * p + position[in_new] % p
        return np.asarray(slots, dtype=np.int32)

    def alloc_decode(self, seq_lens: np.ndarray, last_slots: np.ndarray) -> np.ndarray | None:
        """One slot per request; None when short.

        seq_lens [B] count the new token; last_slots [B] is the slot of token seq_lens[b] - 2. A request takes a new page iff
        (seq_lens[b] - 1) % page_size == 0, else the slot behind its last one. Returns int32 [B].
        """
        if self.page_size == 1:
            return self._take(len(seq_lens))
        opens_page = (np.asarray(seq_lens) - 1) % self.page_size == 0
        pages = self._take(int(np.count_nonzero(opens_page)))
        if pages is None:
            return None
        slots: np.ndarray = np.asarray(last_slots, dtype=np.int32) + np.int32(1)
        slots[opens_page] = pages * np.int32(self.page_size)
        return slots

    def free(self, slots: np.ndarray) -> None:
        """Take slots back. Raises RuntimeError on a slot that is out of range or free already; then nothing is freed.

        With pages > 1: ranges of whole pages, or of their head parts, each starting page aligned; every page named is freed.
        """
        if len(slots) == 0:
            return
        pages = self._pages_of(np.asarray(slots))
        if self._group_depth:
            self._pending.append(pages)
        else:
            self._release(pages)

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Frees inside the block take effect, as one, when the outermost block ends (also by an exception)."""
        self._group_depth += 1
        try:
            yield
        finally:
            self._group_depth -= 1
            if self._group_depth == 0 and self._pending:
                pending, self._pending = self._pending, []
                self._release(pending[0] if len(pending) == 1 else np.concatenate(pending))

    def is_free(self, slots: np.ndarray) -> np.ndarray:
        """bool [n]: which of these slots are free; for checks of the whole."""
        free: np.ndarray = self._is_free[np.asarray(slots) // self.page_size]
        return free

    def _pages_of(self, slots: np.ndarray) -> np.ndarray:
        """The pages of slots (int32, a copy), each named once."""
        if self.page_size == 1:
            return np.array(slots, dtype=np.int32)
        pages: np.ndarray = slots // self.page_size
        is_head = slots == pages * self.page_size
        is_first = np.ones(len(slots), dtype=np.bool_)
        np.not_equal(pages[1:], pages[:-1], out=is_first[1:])
        if not np.array_equal(is_head, is_first):
            raise RuntimeError("free: a range of slots does not start at a page, or names one twice")
        return np.array(pages[is_head], dtype=np.int32)

    def _release(self, pages: np.ndarray) -> None:
        if not bool((pages[1:] > pages[:-1]).all()):
            pages = np.sort(pages)
            if bool((pages[1:] == pages[:-1]).any()):
                raise RuntimeError("free: a slot is named twice")
        if pages[0] < 1 or pages[-1] >= len(self._is_free):
            raise RuntimeError(f"free: slots outside the pool (pages {pages[0]}..{pages[-1]})")
        if bool(self._is_free[pages].any()):
            raise RuntimeError(f"free: already free: pages {pages[self._is_free[pages]][:8].tolist()}")
        self._is_free[pages] = True
        self._released.append(pages)
        self._num_free += len(pages)

    def _take(self, num_pages: int) -> np.ndarray | None:
        if num_pages > self._num_free:
            return None
        if num_pages > len(self._ready) - self._head:
            self._ready = np.sort(np.concatenate([self._ready[self._head :], *self._released]))
            self._head = 0
            self._released = []
        pages = self._ready[self._head : self._head + num_pages].copy()
        self._head += num_pages
        self._num_free -= num_pages
        self._is_free[pages] = False
        return pages
