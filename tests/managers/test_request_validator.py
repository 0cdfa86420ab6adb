"""The one validator: every shape of a request, every limit, and what becomes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.config import ModelInfo, SchedulerInfo, TokenizerManagerConfig
from banyan.managers.errors import RequestError, StartError
from banyan.managers.generation import UNSUPPORTED, GenerateInput
from banyan.managers.io_struct import GenerateReq, unpack_ids
from banyan.managers.ipc import IpcNames
from banyan.managers.request_validator import RequestValidator
from banyan.managers.sessions.sessions import OpenSession, SessionController

VOCAB, CONTEXT, POOL_INPUT, POOL_LEN = 300, 64, 40, 50
IPC = IpcNames(directory="/nowhere", scheduler="", detokenizer="", tokenizer="")


class ByteTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode()) if text != " " else []


def make(**options: Any) -> RequestValidator:
    pool = {"max_req_input_len": POOL_INPUT, "max_req_len": POOL_LEN, **options.pop("pool", {})}
    model = ModelInfo(
        **options.pop("model", {}),
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB,
        context_len=CONTEXT,
        eos_token_ids=[2],
        bos_token_id=1,
        dtype="float32",
        device="cpu",
        attention_backend="torch_native",
        load_format="oracle",
    )
    info = SchedulerInfo(
        model=model, max_total_num_tokens=50, max_running_requests=8, page_size=1, chunked_prefill_size=None, overlap=True, **pool
    )
    config = TokenizerManagerConfig(ipc=IPC, model_path="m", served_model_name="m", tokenizer_path="m", **options)
    return RequestValidator(config, info, ByteTokenizer())


def check(validator: RequestValidator | None = None, /, **request: Any) -> list[GenerateReq]:
    validator = validator or make()
    return validator.prepare(validator.plan(GenerateInput.parse(request)))


def refused(validator: RequestValidator | None = None, /, **request: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(validator, **request)
    assert caught.value.status_code == 400
    return caught.value


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": " "}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text"),
        ({"text": 5}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [[[1]]]}, "input_ids"),
        ({"input_ids": [1, 2.5]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1 << 70]}, "input_ids"),
        ({"input_ids": [1 << 63]}, "input_ids"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": "\udfff"}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "rid": ["x", "y"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["a", "a_0"], "sampling_params": {"n": 0}}, "n"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
        ({"text": ["a", "b"], "extra_key": ["k"]}, "extra_key"),
        ({"text": ["a", "b"], "cache_salt": ["k", "l", "m"]}, "cache_salt"),
        ({"text": "a", "cache_salt": "\ud900"}, "cache_salt"),
        ({"text": "a", "priority": "high"}, "priority"),
        ({"text": "a", "priority": 1 << 32}, "priority"),
        ({"text": "a", "routing_key": "\udfff"}, "routing_key"),
        ({"text": "a", "timeout": 0}, "timeout"),
        ({"text": "a", "timeout": float("inf")}, "timeout"),
        ({"text": "a", "timeout": float("nan")}, "timeout"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 100000, "max_new_tokens": None}}, "min_new_tokens"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 60}}, "min_new_tokens"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [VOCAB]}}, "stop_token_ids"),
        ({"text": "a", "sampling_params": {"stop_regex": ["\udfff"]}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"bad_words": ["\udfff"]}}, "bad_words"),
        ({"text": "a", "custom_logit_processor": "unknown"}, "custom_logit_processor"),
    ],
)
def test_what_cannot_run_is_refused_by_field(request_: dict[str, Any], param: str) -> None:
    assert refused(**request_).param == param


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fields_that_are_not_served_are_refused_unless_off(name: str) -> None:
    assert refused(text="a", **{name: ["x"]}).param == name
    check(text="a", **{name: None})
    check(text="a", **{name: False})


def test_unknown_fields_and_nulls_are_ignored() -> None:
    nulls = dict.fromkeys(GenerateInput.__struct_fields__)
    assert len(check(**{**nulls, "text": "ab", "model": None, "no_such_field": 3})) == 1


def test_a_priority_is_refused_only_if_it_would_be_ignored_and_that_is_not_wanted() -> None:
    assert check(text="a", priority=3, routing_key="k", timeout=2)[0].priority == 3
    strict = make(abort_on_priority_when_disabled=True)
    assert len(check(strict, text="a")) == 1
    with pytest.raises(RequestError, match="priority is disabled") as caught:
        check(strict, text="a", priority=3)
    assert caught.value.status_code == 503


def test_where_engines_meet_is_checked_and_rooms_count_up_in_a_batch() -> None:
    batch = {"text": ["a", "b"], "sampling_params": {"n": 2}}
    assert [message.bootstrap_room for message in check(**batch, bootstrap_room=7)] == [7, 7, 8, 8]
    assert [message.bootstrap_room for message in check(**batch, bootstrap_room=[9, 3])] == [9, 9, 3, 3]
    known = check(text="a", bootstrap_host="10.0.0.1", bootstrap_port=8998, bootstrap_room=2**63 - 1)
    assert known[0].bootstrap_room == 2**63 - 1 and check(text="a")[0].bootstrap_room is None
    assert len(check(**batch, bootstrap_host=["h", "h"], bootstrap_port=[None, 1], bootstrap_room=0)) == 4
    for name, values in {
        "bootstrap_host": ["h h", "h" * 256, ["h"], ["h", "h\n"], 3],
        "bootstrap_port": [0, 65536, [1], "8998"],
        "bootstrap_room": [-1, 2**63 - 1, [1], [1, 2, 3], [0, -1], [0, None], 1.5, True],
    }.items():
        for value in values:
            assert refused(**batch, **{name: value}).param == name, (name, value)


def test_ids_are_bounded_by_the_models_vocabulary() -> None:
    assert unpack_ids(check(input_ids=[0, VOCAB - 1])[0].input_ids).tolist() == [0, VOCAB - 1]
    assert f"got {VOCAB} at position 1" in str(refused(input_ids=[0, VOCAB]))


def test_prompt_length_limits() -> None:
    assert len(unpack_ids(check(text="a" * POOL_INPUT)[0].input_ids)) == POOL_INPUT
    assert str(refused(text="a" * (POOL_INPUT + 1))).startswith("The input (41 tokens) is longer than the KV cache can serve")
    assert str(refused(input_ids=[1] * CONTEXT)) == (
        f"The input ({CONTEXT} tokens) is longer than the model's context length ({CONTEXT} tokens)."
    )
    truncating = make(allow_auto_truncate=True)
    assert unpack_ids(check(truncating, input_ids=list(range(80)))[0].input_ids).tolist() == list(range(POOL_INPUT))


@pytest.mark.parametrize(
    ("given", "limit"), [({}, 40), ({"max_new_tokens": None}, 40), ({"max_new_tokens": 54}, 40), ({"max_new_tokens": 0}, 0)]
)
def test_max_new_tokens_is_cut_to_the_room_left(given: dict[str, Any], limit: int) -> None:
    (message,) = check(text="a" * 10, sampling_params=given)
    assert message.sampling_params.max_new_tokens == limit


def test_an_explicit_limit_beyond_the_context_is_refused() -> None:
    error = refused(text="a" * 10, sampling_params={"max_new_tokens": 55})
    assert str(error).startswith(
        "Requested token count exceeds the model's maximum context length of 64 tokens. You requested a total of 65 tokens:"
    )
    assert error.param == "max_new_tokens"
    (message,) = check(make(allow_auto_truncate=True), text="a" * 10, sampling_params={"max_new_tokens": 55})
    assert message.sampling_params.max_new_tokens == 40
    (message,) = check(make(preferred_sampling_params='{"max_new_tokens": 1000}'), text="a" * 10)
    assert message.sampling_params.max_new_tokens == 40


def test_min_new_tokens_fits_exactly_or_not() -> None:
    params = {"max_new_tokens": None, "min_new_tokens": 40}
    assert check(text="a" * 10, sampling_params=params)[0].sampling_params.min_new_tokens == 40
    assert refused(text="a" * 11, sampling_params=params).param == "min_new_tokens"


def test_a_batch_with_n_is_prompt_major() -> None:
    request = {"text": ["a", "b"], "sampling_params": [{"n": 3, "temperature": 0.5}, {"n": 3, "top_k": 7}]}
    messages = check(**request, rid=["x", "y"], extra_key=["k", "l"], cache_salt="s")
    assert [message.rid for message in messages] == ["x_0", "x_1", "x_2", "y_0", "y_1", "y_2"]
    assert [unpack_ids(message.input_ids)[0] for message in messages] == [97] * 3 + [98] * 3
    assert [message.sampling_params.temperature for message in messages] == [0.5] * 3 + [1.0] * 3
    assert [message.sampling_params.top_k for message in messages] == [-1] * 3 + [7] * 3
    assert [message.extra_key for message in messages] == ["k"] * 3 + ["l"] * 3
    assert {message.cache_salt for message in messages} == {"s"}
    assert {message.sampling_params.n for message in messages} == {1}


@pytest.mark.parametrize(
    ("request_", "rids"),
    [
        ({"text": "a", "rid": "r"}, ["r"]),
        ({"text": "a", "rid": ["r"]}, ["r"]),
        ({"text": ["a"], "rid": "r"}, ["r_0"]),
        ({"text": ["a", "b"], "rid": "r"}, ["r_0", "r_1"]),
        ({"text": ["a", "b"], "rid": ["r", "s"]}, ["r", "s"]),
        ({"text": "a", "rid": "r", "sampling_params": {"n": 2}}, ["r_0", "r_1"]),
        ({"text": ["a", "b"], "rid": "r", "sampling_params": {"n": 2}}, ["r_0", "r_1", "r_2", "r_3"]),
    ],
)
def test_rids(request_: dict[str, Any], rids: list[str]) -> None:
    assert [message.rid for message in check(**request_)] == rids


def test_a_batch_of_embeddings_with_n_is_prompt_major() -> None:
    rows = [[[1.0] * 8], [[2.0] * 8, [3.0] * 8]]
    params = [{"n": 3, "temperature": 0.5}, {"n": 3, "top_k": 7}]
    messages = check(make(model={"hidden_size": 8}), input_embeds=rows, rid=["x", "y"], sampling_params=params)
    assert [message.rid for message in messages] == ["x_0", "x_1", "x_2", "y_0", "y_1", "y_2"]
    assert [np.frombuffer(message.input_embeds, "<f4").reshape(-1, 8)[:, 0].tolist() for message in messages] == [
        *[[1.0]] * 3,
        *[[2.0, 3.0]] * 3,
    ]
    assert [message.sampling_params.top_k for message in messages] == [-1] * 3 + [7] * 3
    assert len({message.rid for message in check(make(model={"hidden_size": 8}), input_embeds=rows, sampling_params=params)}) == 6


@pytest.mark.parametrize(("mode", "told"), [(None, []), ("last", ["last"]), ("full", [True, "last"])])
def test_which_hidden_states_are_told(mode: Any, told: list[Any]) -> None:
    validator = make(return_hidden_states_mode=mode)
    for wish in (True, "last"):
        if wish in told:
            assert [
                each.return_hidden_states for each in check(validator, text=["a", "b"], return_hidden_states=[wish, False])
            ] == [wish, False]
        else:
            assert refused(validator, text="a", return_hidden_states=wish).param == "return_hidden_states"


def test_rids_that_collide_after_expansion() -> None:
    assert refused(text=["a", "b"], rid=["r", "r"], sampling_params={"n": 2}).param == "rid"


def test_seeds() -> None:
    def seeds(validator: RequestValidator, **params: Any) -> list[int | None]:
        return [message.sampling_params.sampling_seed for message in check(validator, text="a", sampling_params=params)]

    given = seeds(make(), n=4, sampling_seed=7)
    assert given[0] == 7
    assert len(set(given)) == 4
    assert given == seeds(make(), n=4, sampling_seed=7)
    assert seeds(make(), n=2, sampling_seed=-3)[0] == -3
    drawn = seeds(make(random_seed=5), n=3)
    assert len(set(drawn)) == 3
    assert drawn == seeds(make(random_seed=5), n=3)
    assert seeds(make()) != seeds(make())


def test_preferred_parameters_lie_under_the_requests() -> None:
    validator = make(preferred_sampling_params='{"temperature": 0.3, "top_k": 5}')
    (message,) = check(validator, text="a", sampling_params={"top_k": 9, "temperature": None})
    assert (message.sampling_params.temperature, message.sampling_params.top_k) == (0.3, 9)
    with pytest.raises(StartError, match="top_p"):
        make(preferred_sampling_params='{"top_p": 7}')


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), min_size=1, max_size=5),
    n=st.integers(1, 4),
    rid=st.one_of(st.none(), st.text("ab_0", min_size=1, max_size=4)),
)
def test_any_batch_expands_to_distinct_rids_in_order(prompts: list[list[int]], n: int, rid: str | None) -> None:
    messages = check(input_ids=prompts, sampling_params={"n": n}, rid=rid)
    assert [unpack_ids(message.input_ids).tolist() for message in messages] == [prompt for prompt in prompts for _ in range(n)]
    assert len({message.rid for message in messages}) == len(prompts) * n
    assert len({message.sampling_params.sampling_seed for message in messages}) == len(prompts) * n


# --- turns of sessions ------------------------------------------------------------------------------------------------------------


def continued(validator: RequestValidator, history: list[int], **request: Any) -> list[int]:
    """The prompt of a turn after that history."""
    controller = SessionController(1)
    controller.open("s", OpenSession(capacity_of_str_len=1000), 0.0)
    plan = validator.plan(GenerateInput.parse({"session_params": {"id": "s"}, **request}))
    assert plan.session is not None
    if history:
        before = controller.begin(plan.session, "before", 0.0)
        controller.commit(before, np.array(history, np.int32))
        controller.finish("before", 0.0, failed=False, aborted=False)
        plan.session.rid = "before"
    plan.turn = controller.begin(plan.session, plan.rids[0], 0.0)
    return [int(token) for token in unpack_ids(validator.prepare(plan)[0].input_ids)]


def test_a_turn_comes_after_its_history() -> None:
    assert continued(make(), [], input_ids=[1, 7]) == [1, 7]
    assert continued(make(), [5, 6], input_ids=[1, 7]) == [5, 6, 7], "its BOS is dropped"
    assert continued(make(), [5, 6], input_ids=[1]) == [5, 6]
    assert continued(make(), [5, 6], input_ids=[7, 1]) == [5, 6, 7, 1]
    assert continued(make(), [5, 6], text="ab") == [5, 6, *b"ab"]


@pytest.mark.parametrize("cut", [False, True])
def test_a_turn_is_measured_with_its_history_and_never_cut(cut: bool) -> None:
    validator = make(allow_auto_truncate=cut)
    assert len(continued(validator, [5] * (POOL_INPUT - 2), input_ids=[7, 8])) == POOL_INPUT
    with pytest.raises(RequestError, match=f"{POOL_INPUT + 1} tokens"):
        continued(validator, [5] * (POOL_INPUT - 2), input_ids=[7, 8, 9])


@pytest.mark.parametrize("wrong", [{"text": ["a"]}, {"text": "a", "sampling_params": {"n": 2}}, {"text": "a", "session_id": "s"}])
def test_a_turn_is_one_prompt(wrong: dict[str, Any]) -> None:
    assert refused(**wrong, session_params={"id": "s"}).param == "session_params"
