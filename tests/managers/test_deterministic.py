"""Deterministic inference: the bits of outputs and log-probabilities are those of the request alone, whatever comes between."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from harness import CONFIG, Harness

from banyan.layers.attention.base import AttentionSpec
from banyan.layers.attention.torch_invariant import TorchInvariantBackend, first_key
from banyan.layers.attention.torch_native import TorchNativeBackend
from banyan.layers.forward_batch import ForwardBatch
from banyan.layers.invariant import InvariantProducts, check_invariance, invariant_linear
from banyan.layers.kernels.cpu.library import NotNative, native_kernels
from banyan.managers.io_struct import LogprobParams, RowLogprobs
from banyan.mem_cache.kv_pool import KVPool
from banyan.model_executor.determinism import determined
from banyan.model_executor.step import RankSpec, RunnerConfig

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**CONFIG, **SIZES},
    "window": {**CONFIG, **SIZES, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen3": {**CONFIG, **SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
}


class Mix:
    """Requests that share beginnings, and how they are run."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        stems = [self.rng.integers(3, 500, 90).tolist() for _ in range(3)]
        self.requests: dict[str, tuple[list[int], dict[str, Any]]] = {}
        for index in range(6):
            prompt = (
                stems[index % 3][: int(self.rng.integers(1, 90))] + self.rng.integers(3, 500, int(self.rng.integers(1, 6))).tolist()
            )
            options: dict[str, Any] = {"max_new_tokens": int(self.rng.integers(1, 17)), "ignore_eos": True}
            if index % 2:
                options |= {
                    "temperature": 0.8,
                    "sampling_seed": index,
                    "top_p": 0.95,
                    "repetition_penalty": 1.1 if index % 3 else 1.0,
                }
            start = int(self.rng.integers(len(prompt) + 1))
            self.requests[f"r{index}"] = prompt, {**options, "logprobs": LogprobParams(start_len=start, top_num=2)}

    def harness(self, folder: Path, runners: list[Any]) -> Harness:
        """One of many ways to serve them. runners: without and with a thread of its own."""
        rng, faults = self.rng, {}
        overlap = bool(rng.integers(2))
        if rng.integers(2):
            faults = {"retract_every": float(rng.integers(3, 9)), "alloc_fail": 0.1}
        return Harness(
            folder,
            overlap=overlap,
            page_size=1,
            load_format="dummy",
            runner=runners[overlap],
            faults=faults,
            total=int(rng.choice([320, 2048])),
            chunked_prefill_size=int(rng.choice([8, 23, 64, 512])),
            enable_mixed_chunk=bool(rng.integers(2)),
            disable_radix_cache=bool(rng.integers(4) == 0),
            schedule_policy=str(rng.choice(["fcfs", "lpm"])),
        )

    def run(self, harness: Harness) -> dict[str, tuple[list[int], bytes]]:
        """In some order, at some moments, some of them twice so that the second time hits the cache."""
        order = list(self.rng.permutation(list(self.requests)))
        for rid in order[: len(order) // 2]:
            self._submit(harness, rid, f"warm-{rid}")
            harness.turn(int(self.rng.integers(0, 9)))
        if self.rng.integers(2):
            harness.drain()
        for rid in order:
            self._submit(harness, rid, rid)
            harness.turn(int(self.rng.integers(0, 6)))
        harness.drain()
        return {rid: bits(harness, rid) for rid in self.requests}

    def alone(self, folder: Path, runner: Any) -> dict[str, tuple[list[int], bytes]]:
        """Each by itself, in one chunk, without a cache."""
        outputs = {}
        for rid in self.requests:
            harness = Harness(
                folder, overlap=False, page_size=1, load_format="dummy", runner=runner, total=2048, disable_radix_cache=True
            )
            self._submit(harness, rid, rid)
            harness.drain()
            outputs[rid] = bits(harness, rid)
        return outputs

    def _submit(self, harness: Harness, rid: str, name: str) -> None:
        prompt, options = self.requests[rid]
        harness.submit(name, prompt, **options)


def bits(harness: Harness, rid: str) -> tuple[list[int], bytes]:
    logprobs: RowLogprobs = harness.logprobs[rid]
    return harness.ids[rid], msgspec.msgpack.encode(logprobs)


@pytest.fixture(
    scope="module", params=[*itertools.product(["torch_invariant"], MODELS), ("cpu", "window"), ("cpu", "qwen3")], ids="-".join
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    backend, model = request.param
    if backend == "cpu" and isinstance(native_kernels(), NotNative):
        pytest.skip("no native kernels")
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    runners = []
    for overlap in (False, True):
        harness = Harness(
            folder,
            overlap=overlap,
            page_size=1,
            load_format="dummy",
            enable_deterministic_inference=True,
            attention_backend=backend,
            disable_radix_cache=True,
        )
        runners.append(harness.runner)
    yield folder, runners
    for runner in runners:
        runner.close()


def check_mix(served: Any, seed: int) -> None:
    folder, runners = served
    mix = Mix(seed)
    alone = mix.alone(folder, runners[0])
    mixed = mix.run(mix.harness(folder, runners))
    for rid, (ids, logprobs) in alone.items():
        assert mixed[rid][0] == ids, rid
        assert mixed[rid][1] == logprobs, rid


@pytest.mark.parametrize("seed", range(2))
def test_bits_do_not_depend_on_what_else_runs(served: Any, seed: int) -> None:
    check_mix(served, seed)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 19))
def test_fifty_mixes(served: Any, seed: int) -> None:
    check_mix(served, seed)


# --- the parts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (512, 64), (64, 96)])
def test_rows_of_products_do_not_depend_on_their_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(*size, generator=generator).to(dtype) for size in (shape, (37, shape[1])))
    check_invariance([weight])
    whole = invariant_linear(x, weight)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight))
    with InvariantProducts():
        for start, size in itertools.product(range(0, 30, 7), (1, 2, 5, 9)):
            assert torch.equal(torch.nn.functional.linear(x[start : start + size], weight), whole[start : start + size])
    assert invariant_linear(x[:0], weight).shape == (0, shape[0])


def attend(backend: Any, pool: KVPool, cuts: list[int], spec: AttentionSpec, qkv: list[torch.Tensor]) -> torch.Tensor:
    """One request of cuts[-1] tokens, computed in the steps that end at the cuts."""
    slots = torch.arange(1, cuts[-1] + 1, dtype=torch.int32)[None]
    outputs, start = [], 0
    for end in cuts:
        lens = {name: torch.tensor([value]) for name, value in (("seq", end), ("extend", end - start), ("prefix", start))}
        batch = ForwardBatch(
            input_ids=torch.zeros(end - start, dtype=torch.int64),
            positions=torch.arange(start, end),
            rows=torch.zeros(1, dtype=torch.int64),
            seq_lens=lens["seq"],
            extend_lens=lens["extend"],
            prefix_lens=lens["prefix"],
            out_cache_loc=slots[0, start:end].long(),
            req_to_token=slots,
            sample_tokens=torch.tensor([end - start - 1]),
            seq_lens_host=lens["seq"].numpy(),
            extend_lens_host=lens["extend"].numpy(),
            prefix_lens_host=lens["prefix"].numpy(),
        )
        backend.plan(batch)
        q, k, v = (part[start:end] for part in qkv)
        outputs.append(backend.forward(q, k, v, spec, batch))
        start = end
    return torch.cat(outputs)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, None), (None, 5.0), (1, None)])
def test_attention_is_that_of_the_reference_and_the_same_in_any_chunks(window: int | None, soft_cap: float | None) -> None:
    spec = AttentionSpec(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, sliding_window=window, soft_cap=soft_cap)
    generator = torch.Generator().manual_seed(2)
    qkv = [torch.randn(75, heads, 16, generator=generator) for heads in (4, 2, 2)]

    def run(kind: Any, cuts: list[int]) -> torch.Tensor:
        pool = KVPool(
            num_slots=96, page_size=1, num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu")
        )
        return attend(kind(pool), pool, cuts, spec, qkv)

    whole = run(TorchInvariantBackend, [75])
    torch.testing.assert_close(whole, run(TorchNativeBackend, [75]), atol=1e-5, rtol=1e-5)
    for cuts in (list(range(1, 76)), [1, 16, 17, 40, 75], [31, 32, 33, 75]):
        assert torch.equal(run(TorchInvariantBackend, cuts), whole)


def test_the_first_key_of_a_tile() -> None:
    assert [first_key(tile, None) for tile in (0, 5)] == [0, 0]
    assert [first_key(tile, 20) for tile in (0, 1, 2, 3)] == [0, 0, 0, 16]


def test_what_cannot_be_had_is_refused() -> None:
    plain = RunnerConfig(model_path="m", attention_backend="torch_native")
    assert determined(plain) is plain
    asked = msgspec.structs.replace(plain, enable_deterministic_inference=True, device="cpu", attention_backend=None)
    assert determined(asked).attention_backend is not None
    for change in ({"device": "cuda"}, {"attention_backend": "torch_native"}, {"ranks": RankSpec(tp_size=2)}):
        with pytest.raises(ValueError, match="deterministic inference"):
            determined(msgspec.structs.replace(asked, **change))
