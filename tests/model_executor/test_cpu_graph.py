"""The CPU graph beyond what test_model_runner.py compares with transformers: bits, fallbacks, KV dtypes."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from banyan.layers.hidden_input import HiddenSpan
from banyan.layers.kernels.cpu.library import Native, NotNative, native_kernels
from banyan.layers.linear import Linear
from banyan.layers.sampling_input import SamplingInput
from banyan.model_executor import forward, weight_form
from banyan.model_executor.forward import is_recorded
from banyan.model_executor.model_runner import ModelRunner
from banyan.model_executor.step import ForwardMode, RunnerConfig, StepInput

VOCAB, NUM_SLOTS = 97, 512
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 600,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 300,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make(path, monkeypatch):
    """Factory of runners that keep the hidden states of each step."""
    runners: list[ModelRunner] = []

    def new(model_path: str = path, **config) -> tuple[ModelRunner, list[torch.Tensor]]:
        runner = ModelRunner(RunnerConfig(model_path=model_path, max_total_tokens=NUM_SLOTS, overlap=False, **config))
        runners.append(runner)
        seen: list[torch.Tensor] = []
        original: Callable[..., torch.Tensor] = runner._forward

        def keep(*args) -> torch.Tensor:
            hidden = original(*args)
            seen.append(hidden.clone())
            return hidden

        monkeypatch.setattr(runner, "_forward", keep)
        return runner, seen

    yield new
    for runner in runners:
        runner.close()


def step(table: np.ndarray, parts: list[tuple[int, int, int]], ids: np.ndarray) -> StepInput:
    """Compute ids [begin, end) of (row, begin, end)."""
    ends = np.array([end for _, _, end in parts], np.int32)
    lens = np.array([end - begin for _, begin, end in parts], np.int32)
    n = len(parts)
    zeros = np.zeros(n, np.int64)
    return StepInput(
        mode=ForwardMode.EXTEND,
        rows=np.array([row for row, _, _ in parts], np.int32),
        seq_lens=ends,
        extend_lens=lens,
        input_ids=np.concatenate([ids[row, begin:end] for row, begin, end in parts]),
        out_cache_loc=np.concatenate([table[row, begin:end] for row, begin, end in parts]),
        sample_index=np.arange(n, dtype=np.int32),
        sampling=SamplingInput(
            np.zeros(n, np.float32), np.ones(n, np.float32), np.full(n, 1 << 30, np.int32), np.zeros(n, np.float32), zeros, zeros
        ),
    )


def tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    slots = (rng.permutation(NUM_SLOTS)[: 2 * 200] + 1).astype(np.int32)
    ids = np.random.default_rng(7).integers(0, VOCAB, (3, 200))
    return np.concatenate([np.zeros((1, 200), np.int32), slots.reshape(2, 200)]), ids


def states(made, seed: int, plan: list[list[tuple[int, int, int]]]) -> torch.Tensor:
    """Hidden states of row 1 over the steps of a plan."""
    table, _ = tables(seed)
    made[0].init_cache(NUM_SLOTS, table)
    return computed(made, seed, plan)


def computed(made, seed: int, plan: list[list[tuple[int, int, int]]]) -> torch.Tensor:
    """The same over the KV that is there."""
    runner, seen = made
    table, ids = tables(seed)
    own = []
    for parts in plan:
        runner.launch(step(table, parts, ids)).wait()
        starts = np.cumsum([0, *(end - begin for _, begin, end in parts)])
        own += [seen[-1][starts[i] : starts[i + 1]] for i, (row, _, _) in enumerate(parts) if row == 1]
    return torch.cat(own)


def test_bits_depend_on_the_request_alone(make) -> None:
    """In one piece; in chunks; token by token beside another request. Other slots, another number of threads."""
    made = make()
    assert made[0].info.explain["forward"] == "one native call a step"
    whole = states(made, 0, [[(1, 0, 150)]])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(states(make(), 1, [[(2, 0, 100)], [(2, 100, 101), (1, 0, 70)], [(1, 70, 150)]]), whole)
    finally:
        torch.set_num_threads(threads)
    one_by_one = [[(2, 0, 3), (1, 0, 1)], *([(1, i, i + 1), (2, i + 2, i + 3)] for i in range(1, 150))]
    assert torch.equal(states(make(), 2, one_by_one), whole)


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
def test_equals_modules_and_torch_attention(kv, make, monkeypatch) -> None:
    plan = [[(1, 0, 60), (2, 0, 5)], [(1, 60, 61), (2, 5, 30)], [(1, 61, 62), (2, 30, 31)]]
    native = states(make(kv_cache_dtype=kv), 0, plan)
    with monkeypatch.context() as patch:
        patch.setattr(forward, "why_not", lambda model, act: "a test wants it so")
        modules = make(kv_cache_dtype=kv)
        assert modules[0].info.explain["forward"] == "module by module: a test wants it so"
        close = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 3e-2}[kv]  # a value at the edge of two steps may go either way
        torch.testing.assert_close(native, states(modules, 0, plan), atol=close, rtol=close)
    other = make(kv_cache_dtype=kv, attention_backend="torch_native")
    assert other[0].info.attention_backend == "torch_native"
    torch.testing.assert_close(native, states(other, 0, plan), atol=close, rtol=close)
    if kv == "int8":
        assert made_bytes(make(kv_cache_dtype=kv)[0]) == 2 * 2 * (2 * 16 + 2 * 4)


def made_bytes(runner: ModelRunner) -> int:
    """Bytes per token of the pool."""
    table, _ = tables(0)
    runner.init_cache(NUM_SLOTS, table)
    pool = runner._cache.backend._pool
    tensors = [pool.k(0), pool.v(0), *(pool.scales(0) or ())]
    return 2 * sum(tensor.nbytes for tensor in tensors) // (NUM_SLOTS + 1)


@pytest.fixture(scope="module")
def other_path(path, tmp_path_factory) -> str:
    """The same model with other weights."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("other")
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_new_weights_are_packed_and_recorded_anew(quantization, make, path, other_path, tmp_path) -> None:
    """After a live update, of all weights or of some, a step gives the bits of a fresh start with them."""
    plan = [[(1, 0, 60), (2, 0, 5)], [(1, 60, 61), (2, 5, 30)]]
    made = make(quantization=quantization)
    runner = made[0]
    before = states(made, 0, plan)
    packed = {linear.packed for linear in runner._model.modules() if isinstance(linear, Linear)}
    assert runner.info.explain["forward"] == "one native call a step" and None not in packed

    runner.update_weights(other_path, "auto", partial=False)
    fresh = states(make(other_path, quantization=quantization), 0, plan)
    assert torch.equal(computed(made, 0, plan), fresh) and not torch.equal(fresh, before)
    assert is_recorded(runner._cache.forward)
    assert packed.isdisjoint(linear.packed for linear in runner._model.modules() if isinstance(linear, Linear))

    weights, changed = load_file(f"{other_path}/model.safetensors"), load_file(f"{path}/model.safetensors")
    part = {name: changed[name] for name in weights if "layers.1.mlp" in name or "embed_tokens" in name}
    for name, tensors in (("part", part), ("whole", weights | part)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    shutil.copy(f"{path}/config.json", tmp_path / "whole")
    runner.update_weights(str(tmp_path / "part"), "auto", partial=True)
    mixed = states(make(str(tmp_path / "whole"), quantization=quantization), 0, plan)
    assert torch.equal(computed(made, 0, plan), mixed) and not torch.equal(mixed, fresh)

    with pytest.raises(ValueError, match="nowhere"):
        runner.update_weights(str(tmp_path / "nowhere"), "auto", partial=False)
    assert torch.equal(computed(made, 0, plan), mixed)


def test_without_kernels_torch_computes_and_says_why(make, monkeypatch) -> None:
    monkeypatch.setattr(weight_form, "native_kernels", lambda: NotNative("off: a test wants it so"))
    runner, _ = make()
    assert runner.info.attention_backend == "torch_native"
    assert (
        "a test wants it so" in runner.info.explain["attention_backend"] and "no native kernels" in runner.info.explain["forward"]
    )
    with pytest.raises(ValueError, match="attention backend cpu needs the native kernels: off: a test wants it so"):
        make(attention_backend="cpu")


def test_ids_and_slots_out_of_bounds_fail_the_step_alone(make) -> None:
    assert isinstance(native_kernels(), Native)
    runner, _ = make()
    table, ids = tables(0)
    runner.init_cache(NUM_SLOTS, table)
    good = runner.launch(step(table, [(1, 0, 9)], ids)).wait().next_ids
    bad_ids = ids.copy()
    bad_ids[2, 3] = VOCAB
    with pytest.raises(IndexError, match="token 3 of the step is outside the vocabulary"):
        runner.launch(step(table, [(2, 0, 9)], bad_ids)).wait()
    bad_table = table.copy()
    bad_table[2, 8] = NUM_SLOTS + 1
    with pytest.raises(IndexError, match="outside"):
        runner.launch(step(bad_table, [(2, 0, 9)], ids)).wait()
    assert runner.launch(step(table, [(1, 0, 9)], ids)).wait().next_ids == good


def test_a_step_that_tells_of_more_than_ids_is_never_given_up(make) -> None:
    runner, _ = made = make()
    table, ids = tables(0)
    states(made, 0, [[(1, 0, 1)]])  # it sets the cache up
    told = []
    for stop in (1, 0):
        of = step(table, [(2, 0, 30)], ids)
        of.hidden = [HiddenSpan(0, 0, 30)]
        of.stop[0] = stop
        told.append(runner.launch(of).wait())
    stopped, whole = told
    assert not stopped.given_up and stopped.next_ids.tolist() == whole.next_ids.tolist()
    assert stopped.hidden.any() and np.array_equal(stopped.hidden, whole.hidden)


def test_a_step_that_is_given_up_leaves_out_what_has_not_begun(make) -> None:
    runner, _ = made = make()
    table, ids = tables(0)
    whole = states(made, 0, [[(1, 0, 60)], [(1, 60, 61)]])

    def seconds(stop: int) -> tuple[float, bool]:
        of = step(table, [(2, 0, 30)], ids)
        of.stop[0] = stop
        outputs = []
        spent = runner._cache.forward.__self__.profile(lambda: outputs.append(runner.launch(of).wait()))
        return sum(spent.values()), outputs[0].given_up

    spent, given_up = seconds(0)
    assert spent > 0 and not given_up
    assert seconds(1) == (0, True)
    assert torch.equal(states(made, 0, [[(1, 0, 60)], [(1, 60, 61)]]), whole), "those that come after it are computed as ever"


@pytest.mark.parametrize("config", [{"kv_cache_dtype": "int4"}, {"kv_cache_dtype": "int8", "attention_backend": "triton"}])
def test_a_kv_dtype_that_does_not_fit_is_refused(config, make) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype|reads KV in float32 only"):
        make(**config)
