"""LiveTable: everything a step must know of the requests that have a row, as arrays indexed by row.

A decode step updates these arrays in place, so that its cost hardly grows with the number of requests. The lengths, in tokens of
a sequence (prompt and output together), obey:

    0 <= confirmed_lens <= kv_lens <= launched_lens <= limits,   known_lens <= launched_lens

    kv_lens         tokens that have a slot: those computed by steps that were launched
    confirmed_lens  tokens whose KV is certainly there: computed by steps that were absorbed
    known_lens      tokens whose id is on the host
    launched_lens   known tokens and those that launched steps will yield
    limits          the length at which the request ends
"""

from __future__ import annotations

import numpy as np

from ..mem_cache.req_to_token import ReqToTokenPool
from ..model_executor.step import TOP_K_ALL, SamplingInput
from .req import Req
from .sampling_params import SamplingParams


class SamplingColumns:
    """Sampling parameters by row."""

    def __init__(self, num_rows: int) -> None:
        self.temperatures = np.zeros(num_rows, np.float32)
        self.top_ps = np.ones(num_rows, np.float32)
        self.top_ks = np.full(num_rows, TOP_K_ALL, np.int32)
        self.min_ps = np.zeros(num_rows, np.float32)
        self.seeds = np.zeros(num_rows, np.int64)

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        self.temperatures[row] = 0.0 if params.is_greedy else params.temperature
        self.top_ps[row] = params.top_p
        self.top_ks[row] = TOP_K_ALL if params.top_k == -1 else min(params.top_k, TOP_K_ALL)
        self.min_ps[row] = params.min_p
        self.seeds[row] = seed

    def take(self, rows: np.ndarray, positions: np.ndarray) -> SamplingInput:
        """The parameters of ``rows``, whose next tokens will be at ``positions``."""
        return SamplingInput(
            temperatures=self.temperatures[rows],
            top_ps=self.top_ps[rows],
            top_ks=self.top_ks[rows],
            min_ps=self.min_ps[rows],
            seeds=self.seeds[rows],
            positions=positions.astype(np.int64),
        )


class LiveTable:
    """The seated requests. Row 0 is never used."""

    def __init__(self, pool: ReqToTokenPool, eos_mask: np.ndarray) -> None:
        num_rows, width = pool.table.shape
        self.pool = pool
        self.eos_mask = eos_mask  # bool [vocabulary]
        self.reqs: list[Req | None] = [None] * num_rows
        self.epochs = np.zeros(num_rows, np.int64)  # goes up when a row changes hands: results of its former owner are stale
        self.tokens = np.zeros((num_rows, width), np.int32)
        self.prompt_lens = np.zeros(num_rows, np.int32)
        self.known_lens = np.zeros(num_rows, np.int32)
        self.launched_lens = np.zeros(num_rows, np.int32)
        self.kv_lens = np.zeros(num_rows, np.int32)
        self.confirmed_lens = np.zeros(num_rows, np.int32)
        self.limits = np.zeros(num_rows, np.int32)
        self.min_lens = np.zeros(num_rows, np.int32)  # no stop token may be sampled below this length
        self.ignore_eos = np.zeros(num_rows, np.bool_)
        self.own_stops = np.zeros(num_rows, np.bool_)  # has stop tokens or strings of its own
        self.logprobs = np.zeros(num_rows, np.bool_)  # wants log-probabilities
        self.hidden = np.zeros(num_rows, np.bool_)  # wants hidden states
        self.embeds = np.zeros(num_rows, np.bool_)  # its prompt is embeddings
        self.controlled = np.zeros(num_rows, np.bool_)  # the runner holds controls for the row, maybe its former owner's
        self.constrained = np.zeros(num_rows, np.bool_)  # a mask says what it may sample
        self.grammatical = np.zeros(num_rows, np.bool_)  # and that for a grammar
        self.jump_ends = np.zeros(num_rows, np.int32)  # the next step computes the row up to here, 0: its newest token
        self.sampling = SamplingColumns(num_rows)

    def seat(self, req: Req, prefix_slots: np.ndarray) -> int:
        """Give a waiting request a row whose first slots are those of its cached prefix. The pool must have a free row."""
        row = self.pool.alloc()
        if row is None:
            raise RuntimeError("no free row for an admitted request")
        num_tokens, num_prefix = req.num_tokens, len(prefix_slots)
        self.pool.write(row, 0, prefix_slots)
        self.tokens[row, :num_tokens] = req.token_ids
        self.reqs[row] = req
        self.prompt_lens[row] = req.num_prompt
        self.known_lens[row] = self.launched_lens[row] = num_tokens
        self.kv_lens[row] = self.confirmed_lens[row] = num_prefix
        self.limits[row] = req.max_len
        self.min_lens[row] = req.num_prompt + req.params.min_new_tokens
        self.ignore_eos[row] = req.params.ignore_eos
        self.own_stops[row] = bool(req.stop_ids) or req.stop_checker is not None
        self.constrained[row] = req.constraint is not None
        self.grammatical[row] = req.constraint is not None and req.constraint.has_grammar
        self.jump_ends[row] = 0
        self.logprobs[row] = req.logprobs is not None
        self.hidden[row] = req.hidden is not None
        self.embeds[row] = req.embeds is not None
        if req.hidden is not None:
            req.hidden.seated(num_prefix)
        self.sampling.set(row, req.params, req.seed)
        req.row = row
        return row

    def unseat(self, req: Req) -> None:
        """Take the row back; the request keeps its known tokens. The slots must have been given away before."""
        row = req.row
        req.token_ids = self.tokens[row, : self.known_lens[row]].copy()
        req.hold = None
        req.row = 0
        self.reqs[row] = None
        self.epochs[row] += 1
        self.pool.free(row)

    def req(self, row: int) -> Req:
        """The request on a row that is taken."""
        req = self.reqs[row]
        if req is None:
            raise RuntimeError(f"row {row} has no request")
        return req

    def next_ends(self, rows: np.ndarray) -> np.ndarray:
        """The length of each running row's KV after its next step."""
        ends: np.ndarray = np.maximum(self.jump_ends[rows], self.launched_lens[rows])
        return ends

    def slots(self, row: int) -> np.ndarray:
        """Writable view of the slots of the row's tokens that have one."""
        return self.pool.table[row, : self.kv_lens[row]]

    def confirmed_tokens(self, row: int) -> np.ndarray:
        """Ids of the tokens whose KV is there."""
        return self.tokens[row, : self.confirmed_lens[row]]

    def seated(self) -> list[Req]:
        """All requests that have a row."""
        return [req for req in self.reqs if req is not None]
