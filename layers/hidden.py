"""Hidden states of a step: embeddings that are laid over those looked up, and rows that are told to the host.

Legend: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .hidden_input import EmbedSpan, HiddenSpan
from .upload import upload


def lay_embeds(x_TH: torch.Tensor, spans: Sequence[EmbedSpan]) -> torch.Tensor:
    """x with the given embeddings in the place of those of their tokens, in x's dtype; x is written to."""
    for span in spans:
        x_TH[span.start : span.start + len(span.values)] = upload(span.values, x_TH.device)
    return x_TH


def read_hidden(hidden_TH: torch.Tensor, spans: Sequence[HiddenSpan]) -> torch.Tensor:
    """A copy of the spans' rows, one after the other: float32 [sum of counts * H]."""
    rows = [hidden_TH[span.start : span.start + span.count] for span in spans]
    return torch.cat(rows).float().flatten()
