"""--enable-deterministic-inference in real processes: alone or in a crowd, cold or cached, in one chunk or many, the same bits."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import CONFIG
from tiny_tokenizers import byte_level_folder

import banyan as bn
from banyan.layers.kernels.cpu.library import NotNative, native_kernels

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
NUM_PROMPTS = 8


@pytest.fixture(scope="module", params=["cpu", "torch_invariant"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[bn.Engine]:
    if request.param == "cpu" and isinstance(native_kernels(), NotNative):
        pytest.skip("no native kernels")
    folder: Path = byte_level_folder(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **SIZES}))
    options: dict[str, Any] = {"attention_backend": request.param, "chunked_prefill_size": 32, "max_total_tokens": 2048}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # products this small are not worth a second thread
        engine = bn.Engine(model_path=str(folder), load_format="dummy", enable_deterministic_inference=True, **options)
    yield engine
    engine.shutdown()


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    stem = [draw.randrange(3, 250) for _ in range(60)]
    return [
        stem[: draw.randrange(1, 60)] + [draw.randrange(3, 250) for _ in range(draw.randrange(1, 40))] for _ in range(NUM_PROMPTS)
    ]


def bits(answer: Any) -> Any:
    meta = answer["meta_info"]
    values = [[entry[0] for entry in meta[name]] for name in ("input_token_logprobs", "output_token_logprobs")]
    return answer["output_ids"], values


def test_the_bits_are_those_of_the_request_alone(engine: bn.Engine) -> None:
    params = [
        {"max_new_tokens": 12, "ignore_eos": True, **({"temperature": 0} if i % 2 else {"temperature": 0.9, "sampling_seed": i})}
        for i in range(NUM_PROMPTS)
    ]
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    alone = []
    for ids, own in zip(prompts(), params, strict=True):
        assert engine.flush_cache().success
        alone.append(bits(engine.generate(input_ids=ids, sampling_params=own, **asked)))
    assert engine.flush_cache().success
    for _ in range(3):  # the first time they share what is not there yet
        crowd: Any = engine.generate(input_ids=prompts(), sampling_params=params, **asked)
        assert [bits(answer) for answer in crowd] == alone
    late = {"return_logprob": True, "logprob_start_len": -1}  # so the prompt comes from the cache
    again: Any = engine.generate(input_ids=prompts()[::-1], sampling_params=params[::-1], **late)
    assert [answer["meta_info"]["cached_tokens"] > 0 for answer in again].count(True) >= NUM_PROMPTS - 1
    assert [(ids, values[1]) for ids, values in map(bits, again)] == [(ids, values[1]) for ids, values in alone[::-1]]
