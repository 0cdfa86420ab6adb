"""Ranks of one model in one process: ids, log-probabilities and pools as one rank has them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from banyan.layers.logprob_input import LogprobRequest
from banyan.layers.parallel import RankLostError, Ranks, own_address
from banyan.layers.rank_spec import RankSpec
from banyan.model_executor.loader import iter_weights
from banyan.model_executor.model_config import load_model_config
from banyan.model_executor.model_runner import ModelRunner
from banyan.model_executor.shard import Shard, ShardError, share
from banyan.model_executor.step import (
    TOP_K_ALL,
    FatalStepError,
    ForwardMode,
    RunnerConfig,
    SamplingInput,
    StepInput,
    StepOutput,
)

VOCAB, SLOTS = 203, 256
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "qwen3": transformers.Qwen3Config(**COMMON),
    "gemma3": transformers.Gemma3TextConfig(**COMMON, sliding_window=7, final_logit_softcapping=3.0),
}


def save(name: str, path: Path) -> str:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return str(path)


def specs(tp: int, pp: int, path: Path, timeout: float = 20.0) -> list[RankSpec]:
    place = f"file://{path}/store-{tp}-{pp}"
    return [
        RankSpec(tp_rank=t, tp_size=tp, pp_rank=p, pp_size=pp, init_method=place, timeout=timeout)
        for p in range(pp)
        for t in range(tp)
    ]


def sampling(temperatures: list[float], positions: list[int]) -> SamplingInput:
    n = len(temperatures)
    return SamplingInput(
        temperatures=np.array(temperatures, np.float32),
        top_ps=np.ones(n, np.float32),
        top_ks=np.full(n, TOP_K_ALL, np.int32),
        min_ps=np.zeros(n, np.float32),
        seeds=np.arange(n, dtype=np.int64),
        positions=np.array(positions, np.int64),
    )


def steps(table: np.ndarray) -> list[StepInput]:
    """Two prompts, one of them with a second chunk, then decoding; each step a fresh copy for each rank."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, 11), rng.integers(3, VOCAB, 6)]
    slots = rng.permutation(np.arange(1, SLOTS))
    table[1, :32], table[2, :32] = slots[:32], slots[32:64]
    ask = [LogprobRequest(index=0, targets=prompts[0][1:8].astype(np.int64), start=0, top_num=2, token_ids=np.array([5]))]
    return [
        StepInput(
            mode=ForwardMode.EXTEND,
            rows=np.array([1, 2], np.int32),
            seq_lens=np.array([7, 6], np.int32),
            extend_lens=np.array([7, 6], np.int32),
            input_ids=np.concatenate([prompts[0][:7], prompts[1]]).astype(np.int64),
            out_cache_loc=np.concatenate([table[1, :7], table[2, :6]]),
            sample_index=np.array([1], np.int32),
            sampling=sampling([0.0], [6]),
            prompt_logprobs=ask,
        ),
        StepInput(
            mode=ForwardMode.EXTEND,
            rows=np.array([1], np.int32),
            seq_lens=np.array([11], np.int32),
            extend_lens=np.array([4], np.int32),
            input_ids=prompts[0][7:].astype(np.int64),
            out_cache_loc=table[1, 7:11].copy(),
            sample_index=np.array([0], np.int32),
            sampling=sampling([0.9], [11]),
        ),
    ]


class Team:
    """The runners of all ranks, each stepped on a thread of its own."""

    def __init__(self, path: str, all_specs: list[RankSpec]) -> None:
        self.pool = ThreadPoolExecutor(len(all_specs))
        self.tables = [np.zeros((4, 130), np.int32) for _ in all_specs]

        def make(spec: RankSpec) -> ModelRunner:
            total = SLOTS + 8 * spec.rank
            return ModelRunner(RunnerConfig(model_path=path, dtype="float32", device="cpu", max_total_tokens=total, ranks=spec))

        self.runners = list(self.pool.map(make, all_specs))
        for runner, table in zip(self.runners, self.tables, strict=True):
            runner.init_cache(runner.max_cache_tokens(), table)

    def step(self, rank: int, step: StepInput) -> StepOutput:
        return self.runners[rank].launch(step).wait()

    def run(self, num_decode: int = 5) -> list[list[StepOutput]]:
        """What each rank gets of each step."""

        def drive(rank: int) -> list[StepOutput]:
            table = self.tables[rank]
            outputs = [self.step(rank, step) for step in steps(table)]
            newest = [int(outputs[1].next_ids[0]), int(outputs[0].next_ids[0])]
            for i in range(num_decode):
                lens = np.array([12 + i, 7 + i], np.int32)
                step = StepInput(
                    mode=ForwardMode.DECODE,
                    rows=np.array([1, 2], np.int32),
                    seq_lens=lens,
                    extend_lens=np.ones(2, np.int32),
                    input_ids=np.array(newest, np.int64),
                    out_cache_loc=np.array([table[1, lens[0] - 1], table[2, lens[1] - 1]]),
                    sample_index=np.arange(2, dtype=np.int32),
                    sampling=sampling([0.9, 0.0], lens.tolist()),
                )
                outputs.append(self.step(rank, step))
                newest = outputs[-1].next_ids.tolist()
            return outputs

        return list(self.pool.map(drive, range(len(self.runners))))

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self.pool.shutdown()


@pytest.fixture
def team():
    made: list[Team] = []

    def make(path: str, all_specs: list[RankSpec]) -> Team:
        made.append(Team(path, all_specs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ranks_compute_what_one_rank_computes(family, tmp_path, team):
    path = save(family, tmp_path)
    (alone,) = team(path, [RankSpec()]).run()
    for tp, pp in ((2, 1), (4, 1), (1, 2), (2, 2)) if family == "llama" else ((2, 2),):
        ranks = team(path, specs(tp, pp, tmp_path))
        assert {runner.max_cache_tokens() for runner in ranks.runners} == {SLOTS}, "the pools agree on the smallest"
        for rank, outputs in enumerate(ranks.run()):
            ids = [output.next_ids.tolist() for output in outputs]
            assert ids == [output.next_ids.tolist() for output in alone], (family, tp, pp, rank)
            assert outputs[0].logprob_values is not None, "every rank gets them, whatever its stage"
            np.testing.assert_allclose(outputs[0].logprob_values, alone[0].logprob_values, atol=2e-5)
            assert outputs[0].logprob_ids.tolist() == alone[0].logprob_ids.tolist()


def test_a_step_that_all_refuse_fails_alone_and_the_next_one_runs(tmp_path, team):
    path = save("llama", tmp_path)
    for tp, pp in ((2, 1), (1, 2)):
        ranks = team(path, specs(tp, pp, tmp_path))

        def refuse(rank: int, ranks: Team = ranks) -> None:
            step = steps(ranks.tables[rank])[0]
            step.input_ids[3] = np.iinfo(np.int64).max
            with pytest.raises(IndexError):
                ranks.step(rank, step)

        list(ranks.pool.map(refuse, range(2)))
        first, second = ranks.run(2)
        assert [o.next_ids.tolist() for o in first] == [o.next_ids.tolist() for o in second]


def test_a_rank_that_does_not_come_ends_the_step_of_the_others_in_time(tmp_path, team):
    ranks = team(save("llama", tmp_path), specs(2, 1, tmp_path, timeout=1.0))
    with pytest.raises(FatalStepError, match=r"rank 0 \(tp 0 of 2, pp 0 of 1\): RankLostError: another rank is lost"):
        ranks.step(0, steps(ranks.tables[0])[0])


def test_a_rank_that_never_starts_is_named_by_its_place(tmp_path):
    (spec, _) = specs(2, 1, tmp_path, timeout=0.5)
    found: list[Exception] = []

    def join() -> None:
        try:
            Ranks(spec)
        except RankLostError as error:
            found.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    thread.join(20)
    assert found and "does not find the others at file://" in str(found[0])


def test_the_parts_cover_the_model_once(tmp_path):
    path = save("llama", tmp_path)
    config = load_model_config(path)
    whole = dict(iter_weights(path, "auto", config))
    for tp in (2, 3, 6):
        shards = [Shard(config, spec) for spec in specs(tp, 1, tmp_path)]
        parts = [dict(iter_weights(path, "auto", config, shard)) for shard in shards]
        assert sum(len(shard.q_heads) for shard in shards) == 6
        for name in ("q_proj", "o_proj"):
            full = whole[f"model.layers.1.self_attn.{name}.weight"]
            dim = 1 if name == "o_proj" else 0
            joined = torch.cat([part[f"model.layers.1.self_attn.{name}.weight"] for part in parts], dim)
            assert torch.equal(joined, full)
        assert torch.equal(torch.cat([part["lm_head.weight"] for part in parts]), whole["lm_head.weight"])
        biases = [part["model.layers.0.mlp.down_proj.bias"] for part in parts]
        assert torch.equal(sum(biases), whole["model.layers.0.mlp.down_proj.bias"])


def test_uneven_heads_and_what_cannot_be_split(tmp_path):
    config = load_model_config(save("llama", tmp_path), overrides={"num_attention_heads": 9, "hidden_size": 72})
    heads = [(len(s.q_heads), len(s.kv_heads)) for s in (Shard(config, spec) for spec in specs(2, 1, tmp_path))]
    assert heads == [(6, 2), (3, 1)]
    five = [Shard(config, spec) for spec in specs(5, 1, tmp_path)]
    assert [(s.kv_heads.start, list(s.q_heads)) for s in five] == [(0, [0, 1]), (0, [2]), (1, [3, 4]), (1, [5]), (2, [6, 7, 8])]
    with pytest.raises(ShardError, match="tp_size 10 is more than the model's 9 attention heads"):
        Shard(config, specs(10, 1, tmp_path)[0])
    with pytest.raises(ShardError, match="pp_size 4 is more than the model's 3 layers"):
        Shard(config, specs(1, 4, tmp_path)[0])
    assert [len(share(10, rank, 4)) for rank in range(4)] == [3, 3, 2, 2]


def test_the_address_that_others_reach():
    assert own_address("file:///x") == "127.0.0.1"
    assert own_address("tcp://127.0.0.1:5000") == "127.0.0.1"
