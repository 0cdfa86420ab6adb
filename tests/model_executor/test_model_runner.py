"""The runner against transformers: tiny random models of every family; shuffled slots, chunks, mixed batches, placeholders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from banyan.layers.attention import torch_native
from banyan.layers.kernels.cpu.library import NotNative
from banyan.layers.sampler import sample
from banyan.model_executor import forward, model_runner, weight_form
from banyan.model_executor.model_runner import ModelRunner
from banyan.model_executor.step import TOP_K_ALL, ForwardMode, RunnerConfig, SamplingInput, StepInput

VOCAB, NUM_SLOTS, WIDTH, MAX_POSITIONS = 211, 512, 130, 128
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 7  # shorter than the prompts
FAMILIES = {
    "llama": transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama tied": transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**COMMON, sliding_window=WINDOW),
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen2 sliding": transformers.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": transformers.Qwen3Config(**COMMON | {"head_dim": 16}),
    "gemma3": transformers.Gemma3TextConfig(
        **COMMON | {"head_dim": 12}, sliding_window=WINDOW, query_pre_attn_scalar=10, final_logit_softcapping=3.0
    ),
}


def reference(config: transformers.PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A model whose biases and norms matter too."""
    torch.manual_seed(seed)
    if isinstance(config, transformers.Gemma3TextConfig):
        config.layer_types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def saved(tmp_path):
    def save(config) -> tuple[transformers.PreTrainedModel, str]:
        model = reference(config)
        model.save_pretrained(tmp_path)
        return model, str(tmp_path)

    return save


@pytest.fixture
def drive(monkeypatch):
    """Factory of drivers; all are closed at the end."""
    drivers: list[Driver] = []

    def make(path: str, **config) -> Driver:
        drivers.append(Driver(monkeypatch, RunnerConfig(model_path=path, max_total_tokens=NUM_SLOTS, **config)))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.runner.close()


class Driver:
    """A scheduler of a few lines: rows, shuffled slots, steps. Records the logits of each step."""

    def __init__(self, monkeypatch, config: RunnerConfig) -> None:
        self.logits: list[torch.Tensor] = []
        sample = model_runner.sample

        def recording(logits, sampling, **kernels):
            self.logits.append(logits.clone())
            return sample(logits, sampling, **kernels)

        monkeypatch.setattr(model_runner, "sample", recording)
        self.runner = ModelRunner(config)
        self.table = np.zeros((9, WIDTH), np.int32)
        self.runner.init_cache(NUM_SLOTS, self.table)
        self.free = (np.random.default_rng(1).permutation(NUM_SLOTS) + config.page_size).tolist()
        self.lens: dict[int, int] = {}

    def step(self, parts: list[tuple[int, list[int], bool]], mode: ForwardMode = ForwardMode.EXTEND, temperature: float = 0.0):
        """Launch (row, its new ids, whether it samples)."""
        locs, seq_lens = [], []
        for row, ids, _ in parts:
            start = self.lens.get(row, 0)
            slots = [self.free.pop() for _ in ids]
            self.table[row, start : start + len(ids)] = slots
            self.lens[row] = start + len(ids)
            locs += slots
            seq_lens.append(self.lens[row])
        index = np.flatnonzero([samples for *_, samples in parts]).astype(np.int32)
        n = len(index)
        sampling = SamplingInput(
            np.full(n, temperature, np.float32),
            np.ones(n, np.float32),
            np.full(n, TOP_K_ALL, np.int32),
            np.zeros(n, np.float32),
            np.arange(n, dtype=np.int64),
            np.array(seq_lens, np.int64)[index],
        )
        i32 = np.int32
        return self.runner.launch(
            StepInput(
                mode=mode,
                rows=np.array([row for row, *_ in parts], i32),
                seq_lens=np.array(seq_lens, i32),
                extend_lens=np.array([len(ids) for _, ids, _ in parts], i32),
                input_ids=np.array([token for _, ids, _ in parts for token in ids], np.int64),
                out_cache_loc=np.array(locs, i32),
                sample_index=index,
                sampling=sampling,
            )
        )


def prompts(*lens: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, VOCAB, n).tolist() for n in lens]


@torch.no_grad()
def expected_logits(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


def check(model, prompt: list[int], outputs: list[int], logits: list[torch.Tensor]) -> None:
    """Each output is the greedy choice, each row of logits is transformers', at every position from the prompt's last."""
    expected = expected_logits(model, prompt + outputs[:-1])[len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(logits), expected, atol=1e-4, rtol=1e-4)
    assert outputs == expected.argmax(-1).tolist()


@pytest.mark.parametrize("way", ["one native call", "modules", "torch attention", "torch attention in small blocks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(family, way, saved, drive, monkeypatch):
    """Three requests: whole, in two chunks, in three chunks; a decode step rides along with chunks; then all decode together."""
    if way == "modules":
        monkeypatch.setattr(forward, "why_not", lambda model, act: "a test wants it so")
    if way == "torch attention in small blocks":
        monkeypatch.setattr(torch_native, "QUERY_BLOCK", 8)
        monkeypatch.setattr(torch_native, "PADDED_MAX_LEN", 21)
    model, path = saved(FAMILIES[family])
    d = drive(path, page_size=4, attention_backend="torch_native" if way.startswith("torch") else None)
    assert d.runner.info.explain["forward"].startswith("one native call" if way == "one native call" else "module by module")
    whole, halves, thirds = prompts(13, 21, 32)
    handles = [
        d.step([(5, whole, True), (2, halves[:10], False)]),
        d.step([(7, thirds[:11], False), (5, [-5], True), (2, halves[10:], True)], ForwardMode.MIXED),
        d.step([(5, [-5], True), (7, thirds[11:12], False), (2, [-2], True)], ForwardMode.MIXED),
        d.step([(7, thirds[12:], True)]),
    ]
    handles += [d.step([(7, [-7], True), (2, [-2], True), (5, [-5], True)], ForwardMode.DECODE) for _ in range(8)]
    ids = [handle.wait().next_ids for handle in handles]
    assert all(handle.done() for handle in handles) and all(i.dtype == np.int64 for i in ids)
    where = {5: [0, 0, 0, None] + [2] * 8, 2: [None, 1, 1, None] + [1] * 8, 7: [None, None, None, 0] + [0] * 8}
    for row, prompt in ((5, whole), (2, halves), (7, thirds)):
        picks = [(step, place) for step, place in enumerate(where[row]) if place is not None]
        check(model, prompt, [int(ids[step][place]) for step, place in picks], [d.logits[step][place] for step, place in picks])


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn fine": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def rope_config(name: str) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**COMMON | {"head_dim": 16}, rope_parameters={"rope_theta": 500.0, **ROPES[name]})


@pytest.mark.parametrize("rope", ROPES)
def test_a_rope_scaling_equals_transformers(rope, saved, drive):
    model, path = saved(rope_config(rope))
    d = drive(path, context_length=MAX_POSITIONS)
    (prompt,) = prompts(90)
    handles = [d.step([(1, prompt[:50], False)]), d.step([(1, prompt[50:], True)])]
    handles += [d.step([(1, [-1], True)], ForwardMode.DECODE) for _ in range(4)]
    ids = [handle.wait().next_ids for handle in handles]
    check(model, prompt, [int(i[0]) for i in ids[1:]], [logits[0] for logits in d.logits[1:]])


def test_scaled_models_differ_from_the_unscaled_one(saved):
    """What makes the test above able to fail."""
    (prompt,) = prompts(90)
    plain = reference(
        transformers.LlamaConfig(**COMMON | {"head_dim": 16}, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    )
    for rope in ROPES:
        if rope != "dynamic":  # unscaled up to max_position_embeddings
            scaled = reference(rope_config(rope))
            assert (expected_logits(scaled, prompt) - expected_logits(plain, prompt))[-1].abs().max() > 0.01, rope


def test_dynamic_rope_is_that_of_the_longest_served_length(saved, drive):
    config = rope_config("dynamic")
    config.max_position_embeddings = 60
    model, path = saved(config)
    d = drive(path, context_length=100)
    (prompt,) = prompts(100)
    d.step([(1, prompt, True)]).wait()
    torch.testing.assert_close(d.logits[0][0], expected_logits(model, prompt)[-1], atol=1e-4, rtol=1e-4)


def test_inline_and_threaded_runs_sample_the_same(saved, drive):
    _, path = saved(FAMILIES["llama"])
    runs = []
    for overlap in (True, False):
        d = drive(path, overlap=overlap)
        a, b = prompts(9, 14)
        handles = [d.step([(1, a, True), (2, b, True)], temperature=1.0)]
        handles += [d.step([(1, [-1], True), (2, [-2], True)], ForwardMode.DECODE, temperature=1.0) for _ in range(5)]
        assert overlap or handles[-1].done()
        runs.append([handle.wait().next_ids.tolist() for handle in handles])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("has_kernels", [True, False])
def test_drawn_tokens_are_those_of_the_torch_sampler(has_kernels, saved, drive, monkeypatch):
    _, path = saved(FAMILIES["llama"])
    if not has_kernels:
        monkeypatch.setattr(weight_form, "native_kernels", lambda: NotNative("off: a test wants it so"))
    d, rows = drive(path), 8
    why = "native (the kernels are there)" if has_kernels else "pytorch (no native kernels: off: a test wants it so)"
    assert d.runner.info.explain["sampling_backend"] == why
    lens = [5 + row for row in range(rows)]
    handle = d.step([(row + 1, ids, True) for row, ids in enumerate(prompts(*lens))], temperature=1.3)
    seeds, positions = np.arange(rows, dtype=np.int64), np.array(lens, np.int64)
    ones = np.ones(rows, np.float32)
    sampling = SamplingInput(ones * 1.3, ones, np.full(rows, TOP_K_ALL, np.int32), ones * 0, seeds, positions)
    drawn = handle.wait().next_ids.tolist()
    assert drawn == sample(d.logits[0].clone(), sampling).tolist() != d.logits[0].argmax(-1).tolist()


def test_dummy_weights_need_no_checkpoint_and_depend_on_the_seed_only(tmp_path, drive):
    for config in (FAMILIES["gemma3"], FAMILIES["qwen2"]):
        config.architectures = [{"gemma3_text": "Gemma3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}[config.model_type]]
        config.save_pretrained(tmp_path)
        logits = []
        for seed in (0, 0, 1):
            d = drive(str(tmp_path), load_format="dummy", random_seed=seed)
            d.step([(1, prompts(12)[0], True)]).wait()
            logits.append(d.logits[0])
        assert torch.isfinite(logits[0]).all()
        assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def test_bfloat16_is_close_to_transformers_in_bfloat16(saved, drive):
    model, path = saved(FAMILIES["gemma3"])
    d = drive(path, dtype="bfloat16")
    (prompt,) = prompts(30)
    d.step([(1, prompt, True)]).wait()
    assert d.runner.info.dtype == "bfloat16"
    torch.testing.assert_close(d.logits[0][0], expected_logits(model.bfloat16(), prompt)[-1], atol=0.08, rtol=0.05)


# --- failures ---------------------------------------------------------------------------------------------------------------------


def test_a_step_that_raises_does_not_stop_the_next(saved, drive):
    model, path = saved(FAMILIES["llama"])
    d = drive(path)
    (prompt,) = prompts(10)
    bad = d.step([(3, [1, VOCAB + 5], True)])
    good = d.step([(1, prompt, True)])
    with pytest.raises(IndexError):
        bad.wait()
    with pytest.raises(IndexError):
        bad.wait()
    assert good.wait().next_ids.tolist() == [int(expected_logits(model, prompt)[-1].argmax())]


def test_logits_that_are_not_finite_fail_their_request_alone(saved, drive):
    model, path = saved(FAMILIES["llama"])
    d = drive(path)
    poisoned, fine = prompts(8, 12)
    with torch.inference_mode():
        d.runner._loaded_model().embed_tokens.weight[poisoned[3]] = float("nan")
    assert poisoned[3] not in fine
    handles = [d.step([(1, poisoned, True), (2, fine, True)])]
    handles += [d.step([(1, [-1], True), (2, [-2], True)], ForwardMode.DECODE) for _ in range(3)]
    ids = np.stack([handle.wait().next_ids for handle in handles])
    assert ids[:, 0].tolist() == [-1] * 4
    check(model, fine, ids[:, 1].tolist(), [logits[1] for logits in d.logits])


def test_a_closed_runner_refuses_work(saved, drive):
    _, path = saved(FAMILIES["llama"])
    d = drive(path)
    handle = d.step([(1, prompts(5)[0], True)])
    d.runner.close()
    d.runner.close()
    assert handle.wait().next_ids.shape == (1,), "what was launched is finished"
    with pytest.raises(RuntimeError, match="closed"):
        d.step([(1, [-1], True)])


def test_a_step_before_init_cache_says_so(saved):
    _, path = saved(FAMILIES["llama"])
    runner = ModelRunner(RunnerConfig(model_path=path, max_total_tokens=8))
    empty = np.empty(0, np.int32)
    floats = np.empty(0, np.float32)
    longs = np.empty(0, np.int64)
    sampling = SamplingInput(floats, floats, empty, floats, longs, longs)
    with pytest.raises(RuntimeError, match="init_cache"):
        runner.launch(StepInput(ForwardMode.DECODE, empty, empty, empty, longs, empty, empty, sampling)).wait()
    runner.close()


def test_info_explains_what_was_derived(saved, drive):
    _, path = saved(FAMILIES["gemma3"])
    info = drive(path).runner.info
    assert info.architectures == ["Gemma3ForCausalLM"]
    assert (info.model_type, info.vocab_size, info.context_len, info.device) == ("gemma3_text", VOCAB, MAX_POSITIONS, "cpu")
    assert (info.eos_token_ids, info.bos_token_id, info.attention_backend) == ([2], 1, "cpu")
    assert {"dtype", "attention_backend", "threads", "pool", "device"} <= set(info.explain)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_backend": "flashy"}, "known are torch_native"),
        ({"device": "tpu"}, "known are auto, cpu, cuda"),
        ({"dtype": "int3"}, "known are auto, bfloat16"),
        ({"json_model_override_args": "{"}, "json_model_override_args is not JSON"),
        ({"json_model_override_args": "[]"}, "must be a JSON object"),
        ({"json_model_override_args": '{"intermediate_size": 60}'}, r"down_proj.weight has shape \[48, 56\]"),
        ({"json_model_override_args": '{"num_hidden_layers": 3}'}, "unexpected tensor model.layers.3."),
        ({"json_model_override_args": '{"num_hidden_layers": 5}'}, "missing tensor model.layers.4."),
    ],
)
def test_what_does_not_fit_ends_in_one_clear_line(config, message, saved):
    _, path = saved(FAMILIES["llama"])
    with pytest.raises(ValueError, match=message) as caught:
        ModelRunner(RunnerConfig(model_path=path, max_total_tokens=64, **config))
    assert "\n" not in str(caught.value)
