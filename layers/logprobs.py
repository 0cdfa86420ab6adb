"""Log-probabilities, of the rows and positions that are asked for and of no others.

Legend: K positions of one request, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .logprob_input import LOGPROB_FLOOR, LogprobRequest
from .sampler import GREEDY_EPS
from .sampling_input import SamplingInput
from .upload import upload

CHUNK_FLOATS = 1 << 24  # logits that exist at once for positions of prompts


class LogprobReader:
    """Collects what one step is asked for. Nothing of a row depends on the other rows."""

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._top_ids: list[torch.Tensor] = []

    def read_prompts(
        self,
        requests: Sequence[LogprobRequest],
        hidden_TH: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
    ) -> None:
        """Of positions in prompts: plain log-softmax. head: hidden states to logits, [K, H] -> float32 [K, V]."""
        step = max(1, CHUNK_FLOATS // vocab_size)
        for request in requests:
            if request.targets is None:
                continue
            targets = upload(request.targets, hidden_TH.device)
            parts = []
            for start in range(0, len(targets), step):
                own = targets[start : start + step]
                begin = request.start + start
                logprobs_KV = head(hidden_TH[begin : begin + len(own)]).log_softmax(-1)
                parts.append(_read(logprobs_KV, own, request))
            self._add(*[torch.cat(column) for column in zip(*parts, strict=True)])

    def prepare(self, requests: Sequence[LogprobRequest], logits_SV: torch.Tensor, sampling: SamplingInput) -> list[torch.Tensor]:
        """log-softmax of logits / temperature of the rows asked for, [1, V] each; sampling may then change the logits. A greedy row
        has temperature 1."""
        rows = []
        for request in requests:
            temperature = float(sampling.temperatures[request.index])
            logits_1V = logits_SV[request.index : request.index + 1]
            rows.append((logits_1V if temperature < GREEDY_EPS else logits_1V / temperature).log_softmax(-1))
        return rows

    def read_sampled(self, requests: Sequence[LogprobRequest], rows: Sequence[torch.Tensor], next_ids: torch.Tensor) -> None:
        """Of sampled tokens; rows as ``prepare`` made them."""
        for request, logprobs_1V in zip(requests, rows, strict=True):
            target = next_ids[request.index : request.index + 1].clamp(min=0)  # what a failed row gets is never read
            self._add(*_read(logprobs_1V, target, request))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values (float32) and ids (int32) as unpack_logprobs takes them apart."""
        if not self._values:
            return torch.empty(0), torch.empty(0, dtype=torch.int32)
        return torch.cat(self._values), torch.cat(self._top_ids)

    def _add(self, values: torch.Tensor, top_values: torch.Tensor, top_ids: torch.Tensor, id_values: torch.Tensor) -> None:
        self._values += [values, top_values.flatten(), id_values.flatten()]
        self._top_ids.append(top_ids.flatten())


def _read(logprobs_KV: torch.Tensor, targets_K: torch.Tensor, request: LogprobRequest) -> tuple[torch.Tensor, ...]:
    logprobs_KV = logprobs_KV.nan_to_num(nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR)
    values = logprobs_KV.gather(1, targets_K[:, None])[:, 0]
    top_values, top_ids = logprobs_KV.topk(request.top_num, dim=-1)
    named = upload(request.token_ids, logprobs_KV.device)
    return values, top_values, top_ids.int(), logprobs_KV.index_select(1, named)
