"""ForwardBatch: all that a forward pass is told.

Legend: B requests, T tokens computed in the step, S requests that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .hidden_input import EmbedSpan


@dataclass(slots=True)
class ForwardBatch:
    """Tensors of one step on its device, with the lengths on the host too, for backends to plan with.

    Request b computes its tokens [prefix_lens[b], seq_lens[b]); they are consecutive in input_ids, request after request. There is
    no mode: a request whose extend length is 1 is a decode step.
    """

    input_ids: torch.Tensor  # int64 [T], placeholders resolved
    positions: torch.Tensor  # int64 [T]
    rows: torch.Tensor  # int64 [B]
    seq_lens: torch.Tensor  # int64 [B], with this step's tokens
    extend_lens: torch.Tensor  # int64 [B]
    prefix_lens: torch.Tensor  # int64 [B], seq_lens - extend_lens
    out_cache_loc: torch.Tensor  # int64 [T], slots that this step's K and V are written to
    req_to_token: torch.Tensor  # int32 [rows + 1, width], slots of each row's tokens
    sample_tokens: torch.Tensor  # int64 [S], index in [0, T) of the last token of each request that samples
    seq_lens_host: np.ndarray  # int64 [B]
    extend_lens_host: np.ndarray  # int64 [B]
    prefix_lens_host: np.ndarray  # int64 [B]
    embeds: Sequence[EmbedSpan] = ()  # of tokens whose ids mean nothing
    stop: np.ndarray | None = None  # int32 [1], on the host: as StepInput.stop
