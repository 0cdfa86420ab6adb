"""What a small body says once and means many times is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from banyan.managers import request_size
from banyan.managers.config import ModelInfo, SchedulerInfo, TokenizerManagerConfig
from banyan.managers.continuations import continued
from banyan.managers.errors import RequestError
from banyan.managers.generation import GenerateInput, output_of_row, written
from banyan.managers.io_struct import LogprobColumns, RowLogprobs, TextOutput
from banyan.managers.ipc import IpcNames
from banyan.managers.request_size import MAX_CHOICES, MAX_COPIED_BYTES, MAX_JOINED, is_batch
from banyan.managers.request_validator import RequestValidator
from banyan.managers.scoring import ScoreInput, _prompts

VOCAB = 1000
IPC = IpcNames(directory="", scheduler="", detokenizer="", tokenizer="")
MODEL = ModelInfo(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=VOCAB,
    hidden_size=4,
    context_len=20_000,
    eos_token_ids=[2],
    bos_token_id=1,
    dtype="float32",
    device="cpu",
    attention_backend="native",
    load_format="gguf",
)
INFO = SchedulerInfo(
    model=MODEL,
    max_total_num_tokens=30_000,
    max_req_input_len=19_999,
    max_req_len=20_000,
    max_running_requests=4,
    page_size=1,
    chunked_prefill_size=None,
    overlap=True,
)


class CountingTokenizer:
    """One token per character; counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_calls += 1
        return [ord(char) % VOCAB for char in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer()


@pytest.fixture
def validator(tokenizer: CountingTokenizer) -> RequestValidator:
    config = TokenizerManagerConfig(ipc=IPC, model_path="m", served_model_name="m", tokenizer_path="/nowhere")
    return RequestValidator(config, INFO, tokenizer)


def refused(validator: RequestValidator, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        validator.prepare(validator.plan(GenerateInput.parse(body)))
    return caught.value


def test_parameters_count_for_every_choice(validator: RequestValidator) -> None:
    bias = {str(token_id): 0.5 for token_id in range(VOCAB)}
    many = [[5, 6]] * 20_000
    assert refused(validator, input_ids=many, sampling_params={"logit_bias": bias}).param == "sampling_params"
    assert refused(validator, input_ids=many[:200], sampling_params={"logit_bias": bias, "n": 100}).param == "n"
    ids = list(range(VOCAB))
    assert refused(validator, input_ids=many * 3, return_logprob=True, token_ids_logprob=ids).param == "sampling_params"
    messages = validator.prepare(
        validator.plan(GenerateInput.parse({"input_ids": many[:100], "sampling_params": {"logit_bias": bias}}))
    )
    assert len(messages) == 100


def test_a_prompt_counts_for_every_sample_but_the_first(validator: RequestValidator) -> None:
    long = [[5] * 19_000] * 20
    assert refused(validator, input_ids=long, sampling_params={"n": 128}).param == "n"
    embeds = [[0.5] * 4] * 19_000
    assert refused(validator, input_embeds=[embeds] * 4, sampling_params={"n": 128}).param == "n"
    messages = validator.prepare(validator.plan(GenerateInput.parse({"input_ids": [[5] * 19_000] * 2000})))
    assert sum(len(message.input_ids) for message in messages) > MAX_COPIED_BYTES


def test_samples_share_their_prompt_and_differ_in_name_and_seed(validator: RequestValidator) -> None:
    plan = validator.plan(GenerateInput.parse({"input_embeds": [[0.5] * 4] * 3, "rid": "x", "sampling_params": {"n": 3}}))
    messages = validator.prepare(plan)
    assert [message.rid for message in messages] == ["x_0", "x_1", "x_2"]
    assert len({message.sampling_params.sampling_seed for message in messages}) == 3
    assert all(message.input_embeds is messages[0].input_embeds for message in messages)


def test_bad_words_are_spelled_once(validator: RequestValidator, tokenizer: CountingTokenizer) -> None:
    words = [f"word{number}" for number in range(10)]
    messages = validator.prepare(
        validator.plan(GenerateInput.parse({"input_ids": [[5]] * 50, "sampling_params": {"bad_words": words}}))
    )
    assert tokenizer.num_calls == 20
    assert all(message.bad_word_ids == messages[0].bad_word_ids for message in messages)
    own = [{"bad_words": ["ab"]}, {"bad_words": ["cd"]}]
    first, second = validator.prepare(validator.plan(GenerateInput.parse({"input_ids": [[5], [6]], "sampling_params": own})))
    assert (first.bad_word_ids[0], second.bad_word_ids[0]) == ([97, 98], [99, 100])


def test_one_prompt_before_many_texts() -> None:
    for prompt, items, kind in (("x" * 1000, ["a"] * 60_000, str), ([5] * 1000, [[6]] * 60_000, list), ("x", ["a"] * 70_000, str)):
        with pytest.raises(RequestError) as caught:
            continued([prompt], items, single=True, kind=kind)
        assert caught.value.param == "continuations"
        with pytest.raises(RequestError) as caught:
            _prompts(ScoreInput(query=prompt, items=items, label_token_ids=[1]))  # type: ignore[arg-type]
        assert caught.value.param == "items"
    assert len(continued(["x" * 1000], ["a"] * 1000, single=True, kind=str)) == 1000
    assert MAX_JOINED < 1000 * 60_000


def test_alternatives_at_every_token_of_a_prompt(validator: RequestValidator) -> None:
    wish = {"return_logprob": True, "logprob_start_len": 0}
    named = {**wish, "token_ids_logprob": list(range(500))}
    error = refused(validator, input_ids=[5] * 19_000, **named)
    assert (error.param, "9500000" in error.message) == ("token_ids_logprob", True)
    assert refused(validator, input_ids=[[5] * 1000] * 500, **wish, top_logprobs_num=20).param == "top_logprobs_num"
    assert (
        refused(validator, input_ids=[5] * 19_000, **wish, top_logprobs_num=20, sampling_params={"n": 30}).param
        == "top_logprobs_num"
    )
    for body in ({**named, "logprob_start_len": 18_000}, {**wish, "top_logprobs_num": 20}, {**named, "logprob_start_len": -1}):
        assert len(validator.prepare(validator.plan(GenerateInput.parse({"input_ids": [5] * 19_000, **body})))) == 1


@pytest.mark.parametrize("num_values", [10, 100_000])
def test_large_outputs_are_written_beside_the_loop(num_values: int) -> None:
    values = b"\0\0\0\0" * num_values
    row = RowLogprobs(output=LogprobColumns(values=values))
    rows = TextOutput(
        rids=["a"],
        texts=["x"],
        token_ids=b"",
        num_ids=[0],
        finish_reasons=[None],
        prompt_tokens=[1],
        completion_tokens=[0],
        cached_tokens=[0],
        num_retractions=[0],
    )
    output = output_of_row(rows, 0, index=0, token_ids=[])
    output.logprobs = row

    async def thread() -> int:
        return await written(lambda _: threading.get_ident(), output)

    assert (asyncio.run(thread()) == threading.get_ident()) == (num_values == 10)


def test_more_prompts_than_choices(validator: RequestValidator) -> None:
    assert refused(validator, text=["a"] * (MAX_CHOICES + 1)).param == "n"


@pytest.mark.parametrize(
    ("body", "large"),
    [
        ({"text": "a"}, False),
        ({"input_ids": [1, 2]}, False),
        ({"text": ["a"]}, True),
        ({"input_ids": [[1], [2]]}, True),
        ({"text": "a", "continuations": ["b"]}, True),
        ({"text": "a", "sampling_params": [{}]}, True),
    ],
)
def test_what_is_checked_beside_the_loop(body: dict[str, Any], large: bool) -> None:
    assert is_batch(GenerateInput.parse(body)) is large


def test_ids_twice_do_not_make_a_list_longer_than_the_vocabulary(validator: RequestValidator) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        assert refused(validator, text="a", sampling_params={name: [5] * (VOCAB + 1)}).param == name
    assert request_size.MAX_CHOICES == 65_536  # as docs/api.md says
