"""What libraries that read KV by pages are told: page tables made from req_to_token, without asking the device for anything.

Legend: B requests, P pages of a step in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..forward_batch import ForwardBatch
from ..upload import upload


@dataclass(slots=True)
class PageList:
    """The pages of each request one after the other: request b owns indices[indptr[b] : indptr[b + 1]]."""

    indptr: torch.Tensor  # int32 [B + 1] on the host
    last_page_len: torch.Tensor  # int32 [B] on the host, in 1..page_size; 0 for a request without keys
    indices: torch.Tensor  # int32 [P] on the device


def page_list(batch: ForwardBatch, first: np.ndarray, lens: np.ndarray, page_size: int) -> PageList:
    """Pages that hold the tokens [first, first + lens) of each request; first is at the start of a page."""
    num_pages = -(-lens // page_size)
    indptr = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(num_pages, out=indptr[1:])
    last = np.where(lens > 0, lens - (num_pages - 1) * page_size, 0)
    device, total = batch.rows.device, int(indptr[-1])
    starts, counts, begins = upload(np.stack([indptr[:-1], num_pages, first]), device)
    request = torch.repeat_interleave(torch.arange(len(lens), device=device), counts, output_size=total)
    nth = torch.arange(total, device=device) - starts[request]
    cells = begins[request] + nth * page_size
    indices = batch.req_to_token[batch.rows[request], cells]
    if page_size > 1:
        indices = indices // page_size
    return PageList(torch.from_numpy(indptr.astype(np.int32)), torch.from_numpy(last.astype(np.int32)), indices)


def page_table(batch: ForwardBatch, num_pages: int, page_size: int) -> torch.Tensor:
    """int32 [B, num_pages]: the first pages of each request. Cells beyond a request's end hold anything."""
    table = batch.req_to_token[:, : num_pages * page_size : page_size].index_select(0, batch.rows)
    return table // page_size if page_size > 1 else table


def indptr_of(lens: np.ndarray) -> torch.Tensor:
    """int32 [B + 1] on the host: 0 and the running sums."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
