"""The answer to a request for the scores of continuations: few requests are computed (score_tree.py), every item is answered."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .generation import Generation, Output
from .io_struct import GenerateReq, LogprobColumns, LogprobParams, RowLogprobs, pack_ids, unpack_ids
from .request_plan import RequestPlan
from .score_tree import ScoreTree, Told


def generation_of(plan: RequestPlan, abort: Callable[[list[str]], None]) -> Generation:
    """The handle on the answer of a request that was planned."""
    kind = ScoredGeneration if plan.only_scores else Generation
    return kind(plan.rids, num_prompts=plan.num_prompts, n=plan.n, single=plan.is_single_prompt, abort=abort)


class ScoredGeneration(Generation):
    """Items end as soon as the carriers that they need have ended; a carrier that is aborted aborts the items that need it.

    A carrier has the rid and the index of its leader. What it computed counts as its leader's: cached_tokens of an item are those
    of its tokens that were not computed for it.
    """

    _tree: ScoreTree | None = None

    def begin(self, plan: RequestPlan, messages: list[GenerateReq]) -> list[GenerateReq]:
        """The carriers' requests. ``followers`` says which rids are none, and who carries them."""
        super().begin(plan, messages)
        tree = self._tree = plan.tree
        if tree is None:
            return messages
        self._carriers = {carrier.leader: number for number, carrier in enumerate(tree.carriers)}
        self._told: list[Told | None] = [None] * len(tree.carriers)
        self._computed = [0] * len(messages)  # tokens, by item
        self._needed_by: list[list[int]] = [[] for _ in tree.carriers]
        for item in range(len(messages)):
            for number in tree.needs[item]:
                self._needed_by[number].append(item)
            if item not in self._carriers:
                self.followers[self.rids[item]] = [self.rids[tree.carriers[number].leader] for number in tree.needs[item]]
        return [
            msgspec.structs.replace(
                messages[carrier.leader],
                input_ids=pack_ids(unpack_ids(messages[carrier.leader].input_ids)[:-1]),
                logprobs=LogprobParams(start_len=carrier.start, token_ids=carrier.named, after_prompt=True),
            )
            for carrier in tree.carriers
        ]

    def push(self, output: Output) -> None:
        """Take in what a carrier told, all at once, with its end."""
        tree, reason = self._tree, output.finish_reason
        if tree is None or reason is None:
            super().push(output)
            return
        number = self._carriers[output.index]
        self._computed[output.index] = output.prompt_tokens - output.cached_tokens
        if reason.kind != "abort" and output.logprobs is not None and output.logprobs.input is not None:
            self._told[number] = tree.told(number, output.logprobs.input)
        for item in self._needed_by[number]:
            ready = all(self._told[other] is not None for other in tree.needs[item])
            if ready or reason.kind == "abort":
                super().push(self._item(item, output, tree.scores(item, self._told) if ready else None))

    def _item(self, item: int, carrier: Output, scores: LogprobColumns | None) -> Output:
        num_tokens = len(self.packed_prompts[item]) // 4
        return Output(
            index=item,
            text="",
            token_ids=[],
            finish_reason=carrier.finish_reason,
            prompt_tokens=num_tokens,
            completion_tokens=0,
            cached_tokens=0 if scores is None else num_tokens - self._computed[item],
            num_retractions=carrier.num_retractions,
            logprobs=None if scores is None else RowLogprobs(output=LogprobColumns(), input=scores),
            phases=carrier.phases,
        )
