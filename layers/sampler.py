"""Sampling: banned ids, temperature, top_k, top_p over what top_k kept (renormalised), min_p relative to the best token, one draw.

Every filter keeps a prefix of the candidates in descending order of probability (ties: lower id first), so a row comes down to
three numbers: how long the prefix is, its mass, and where u times that mass falls in the cumulative sum, where u is the row's own
uniform (rng.uniforms). Nothing of a row depends on the other rows of its batch.

Almost always the prefix, or the draw, ends within the best few hundred candidates: those are taken by topk, and only rows that
need more are sorted. Masses are summed in float64.

Legend: S rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .rng import uniforms
from .sampling_input import FAILED, NO_CHOICE, TOP_K_ALL, SamplingInput
from .token_mask import apply_mask
from .upload import upload

NUM_CANDIDATES = 1024
GREEDY_EPS = 1e-6  # temperatures below are greedy
_UNDECIDED = -3

ChooseIds = Callable[[torch.Tensor, SamplingInput], torch.Tensor]  # logits [S, V] -> ids [S], with FAILED and NO_CHOICE as below
DrawIds = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits [S, V], greedy ids [S]) -> ids [S]


def sample(
    logits_SV: torch.Tensor,
    sampling: SamplingInput,
    *,
    num_candidates: int = NUM_CANDIDATES,
    draw: DrawIds | None = None,
    choose: ChooseIds | None = None,
) -> torch.Tensor:
    """int64 [S]: the id that each row samples, FAILED where its logits hold NaN or +inf, NO_CHOICE where all are -inf.

    logits is float32 and may be modified. choose: a kernel for all that follows bans and masks; draw: one that
    does without the host. num_candidates is for tests: it changes the cost, never the result.
    """
    ban(logits_SV, sampling)
    if sampling.allowed is not None:
        apply_mask(logits_SV, sampling.allowed)
    if choose is not None:
        return choose(logits_SV, sampling)
    greedy = (sampling.temperatures < GREEDY_EPS) | (sampling.top_ks == 1)
    best = logits_SV.argmax(dim=-1, keepdim=True)  # a NaN counts as the greatest, so one look at the best finds any
    top = logits_SV.gather(1, best)
    result = torch.where(torch.isfinite(top), best, torch.where(top == float("-inf"), NO_CHOICE, FAILED))[:, 0]
    if greedy.all():
        return result
    if draw is not None:
        drawn = draw(logits_SV, best[:, 0])
        return torch.where(torch.isfinite(top[:, 0]), drawn, result)
    drawing = torch.from_numpy(np.flatnonzero(~greedy)).to(logits_SV.device)
    drawing = drawing[result.index_select(0, drawing) >= 0]
    if drawing.numel():
        params = _RowParams.of(sampling, drawing, logits_SV.shape[1])
        z = logits_SV.index_select(0, drawing).sub_(top.index_select(0, drawing)).div_(params.temperature)
        result[drawing] = _draw(z, params, num_candidates)
    return result


def draw_params(sampling: SamplingInput) -> np.ndarray:
    """float64 [5, S]: temperature, top_p, min_p, top_k and the uniform of each row, as a kernel takes them."""
    draws = uniforms(sampling.seeds, sampling.positions)
    return np.stack([sampling.temperatures, sampling.top_ps, sampling.min_ps, sampling.top_ks, draws]).astype(np.float64)


def ban(logits_SV: torch.Tensor, sampling: SamplingInput) -> None:
    """Make the banned ids impossible, in place."""
    if sampling.banned_rows.size:
        device = logits_SV.device
        rows, ids = upload(np.stack([sampling.banned_rows, sampling.banned_ids]).astype(np.int64), device)
        logits_SV[rows, ids] = float("-inf")


@dataclass(slots=True)
class _RowParams:
    """Sampling parameters of some rows, each [S, 1]."""

    vocab_size: int
    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float64
    top_k: torch.Tensor  # int64
    min_p: torch.Tensor  # float64
    uniform: torch.Tensor  # float64

    @classmethod
    def of(cls, sampling: SamplingInput, rows: torch.Tensor, vocab_size: int) -> _RowParams:
        index = rows.cpu().numpy()

        def column(values: np.ndarray, dtype: type) -> torch.Tensor:
            return torch.from_numpy(values[index].astype(dtype)).to(rows.device)[:, None]

        return cls(
            vocab_size=vocab_size,
            temperature=column(sampling.temperatures, np.float32),
            top_p=column(sampling.top_ps, np.float64),
            top_k=column(sampling.top_ks, np.int64),
            min_p=column(sampling.min_ps, np.float64),
            uniform=column(uniforms(sampling.seeds, sampling.positions), np.float64),
        )

    def row(self, i: int) -> _RowParams:
        """Parameters of one row, [1, 1]."""
        one = slice(i, i + 1)
        return _RowParams(
            self.vocab_size, self.temperature[one], self.top_p[one], self.top_k[one], self.min_p[one], uniform=self.uniform[one]
        )


def _draw(z_SV: torch.Tensor, params: _RowParams, num_candidates: int) -> torch.Tensor:
    """Ids drawn from logits that are divided by temperature and at most 0."""
    if num_candidates >= z_SV.shape[1]:
        result = torch.full((z_SV.shape[0],), _UNDECIDED, device=z_SV.device)
    else:
        # Row by row: how a batched reduction is split, hence rounded, depends on the number of rows.
        total = torch.stack([row.sum(dtype=torch.float64) for row in z_SV.exp()])[:, None]
        z_SC, ids_SC = _best(z_SV, num_candidates)
        # topk leaves open which of the ids that tie with the last candidate it takes, so these do not count
        num_sure = (z_SC > z_SC[:, -1:]).sum(-1, keepdim=True)
        result = _pick(z_SC.double().exp(), ids_SC, num_sure, total, params)
    for i in (result == _UNDECIDED).nonzero()[:, 0].tolist():
        z_1V, ids_1V = z_SV[i : i + 1].sort(dim=-1, descending=True, stable=True)
        weights_1V = z_1V.double().exp()
        num_sure = torch.full_like(ids_1V[:, :1], z_1V.shape[1])
        result[i] = _pick(weights_1V, ids_1V, num_sure, weights_1V.sum(-1, keepdim=True), params.row(i))[0]
    return result


def _best(z_SV: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest values of each row with their ids, descending, ties by lower id."""
    ids_SC = z_SV.topk(num_candidates, dim=-1, sorted=False).indices.sort(dim=-1).values
    z_SC, order = z_SV.gather(1, ids_SC).sort(dim=-1, descending=True, stable=True)
    return z_SC, ids_SC.gather(1, order)


def _pick(
    weights_SC: torch.Tensor, ids_SC: torch.Tensor, num_sure: torch.Tensor, total: torch.Tensor, params: _RowParams
) -> torch.Tensor:
    """The id each row draws from its candidates, _UNDECIDED where the first num_sure [S, 1] of them do not settle it.

    total [S, 1] is the mass of the whole vocabulary in the unit of the weights. num_sure is the vocabulary's size where the
    candidates are all of it; then every row is settled.
    """
    num_candidates = weights_SC.shape[1]
    sure = torch.arange(num_candidates, device=weights_SC.device)[None] < num_sure
    cum_SC = weights_SC.cumsum(-1)
    complete = num_sure == num_candidates
    endless = torch.full_like(num_sure, TOP_K_ALL)  # length of a prefix that ends somewhere beyond the sure candidates

    def mass_of(length: torch.Tensor) -> torch.Tensor:
        return cum_SC.gather(1, length.clamp(1, num_candidates) - 1)

    top_k = torch.where(complete, params.top_k.clamp(max=num_candidates), params.top_k.clamp(max=params.vocab_size))
    target = params.top_p * torch.where(top_k <= num_sure, mass_of(top_k), total)
    nucleus = (sure & (cum_SC - weights_SC < target)).sum(-1, keepdim=True)
    nucleus_ends = complete | ((num_sure > 0) & (mass_of(num_sure) >= target))
    nucleus = torch.where((params.top_p < 1) & nucleus_ends, nucleus, endless)
    likely = (sure & (weights_SC >= params.min_p * weights_SC[:, :1])).sum(-1, keepdim=True)
    likely = torch.where((params.min_p > 0) & (complete | (likely < num_sure)), likely, endless)
    kept = torch.minimum(torch.minimum(top_k, nucleus), likely)

    all_kept = (top_k >= params.vocab_size) & (params.top_p >= 1) & (params.min_p <= 0)
    mass = torch.where(all_kept & ~complete, total, mass_of(torch.minimum(kept, num_sure)))
    choice = torch.minimum((cum_SC <= params.uniform * mass).sum(-1, keepdim=True), kept - 1)
    target_known = (params.top_p >= 1) | (top_k <= num_sure) | (top_k >= params.vocab_size)
    settled = torch.where(all_kept, choice < num_sure, target_known & (kept <= num_sure))
    return torch.where(settled, ids_SC.gather(1, choice.clamp(max=num_candidates - 1)), _UNDECIDED)[:, 0]
