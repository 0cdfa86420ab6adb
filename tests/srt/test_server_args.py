"""The table of options: one source for the command line, Engine's keywords and the configs of the processes."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from banyan.managers.errors import StartError
from banyan.managers.ipc import IpcNames
from banyan.managers.schedule_policy import POLICIES
from banyan.mem_cache.eviction import EVICTION_POLICIES
from banyan.srt.launcher import launch
from banyan.srt.server_args import ServerArgs, add_arguments, flag, options

IPC = IpcNames(directory="/d", scheduler="a", detokenizer="b", tokenizer="c")
SAMPLES: dict[type, Any] = {int: 64, float: 0.5, str: "x", bool: True}
OWN_SAMPLES = {
    "preferred_sampling_params": '{"a": 1}',
    "json_model_override_args": '{"a": 1}',
    "reasoning_parser": "qwen3",
    "logit_processors": '{"a": "some.module:Class"}',
    "tool_call_parser": "hermes",
    "log_requests_level": 2,
    "nnodes": 2,
    "node_rank": 1,
}
NEEDS = {  # options that an option is refused without
    "nnodes": {"tp_size": 2, "dist_init_addr": "127.0.0.1:5000", "dist_token": "x" * 16},
    "node_rank": {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000", "dist_token": "x" * 16},
}


def parse(*argv: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return ServerArgs.from_namespace(parser.parse_args(argv))


def test_every_option_is_explained_and_has_a_flag() -> None:
    table = options()
    assert [option.name for option in table] == list(ServerArgs.__struct_fields__)
    assert len(table) < 150
    assert all(len(option.help) > 15 for option in table)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for option in table:
        assert flag(option.name) in text
        assert "(default: " + ("derived at start" if option.default is None else str(option.default)) + ")" in text


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_flag_and_keyword_give_the_same(option: Any, tmp_path: Path) -> None:
    value = OWN_SAMPLES.get(option.name, option.choices[-1] if option.choices else SAMPLES[option.kind])
    if option.name in ("chat_template", "tokenizer_path"):
        value = str(tmp_path / "file")
        Path(value).write_text("")
    needs = NEEDS.get(option.name, {})
    argv = [flag(option.name)] if option.kind is bool else [flag(option.name), str(value)]
    argv += [part for name, needed in needs.items() for part in (flag(name), str(needed))]
    from_flag, from_keyword = parse(*argv), ServerArgs.from_kwargs({option.name: value, **needs})
    assert from_flag == from_keyword
    assert getattr(from_flag, option.name) == value
    assert ServerArgs.from_kwargs({}) == parse()


def test_overlap_has_three_states() -> None:
    assert [
        parse(*argv).disable_overlap_schedule for argv in ([], ["--disable-overlap-schedule"], ["--no-disable-overlap-schedule"])
    ] == [
        None,
        True,
        False,
    ]


def test_aliases_and_paths() -> None:
    assert parse("--model", "m").model_path == "m"
    assert ServerArgs.from_kwargs({"model_path": Path("a/b")}).model_path == "a/b"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 70000}, "--port"),
        ({"port": "80"}, "--port"),
        ({"port": True}, "--port"),
        ({"dtype": "int8"}, "--dtype"),
        ({"schedule_policy": "sjf"}, "--schedule-policy"),
        ({"page_size": 0}, "--page-size"),
        ({"radix_eviction_policy": "clock"}, "--radix-eviction-policy"),
        ({"max_queued_requests": -1}, "--max-queued-requests"),
        ({"request_queue_timeout": 0}, "--request-queue-timeout"),
        ({"request_running_timeout": -1}, "--request-running-timeout"),
        ({"max_wait_steps": 0}, "--max-wait-steps"),
        ({"mem_fraction_static": 0.0}, "--mem-fraction-static"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static"),
        ({"context_length": 0}, "--context-length"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size"),
        ({"chunked_prefill_size": 8, "page_size": 16}, "page size 16"),
        ({"max_total_tokens": 8, "page_size": 16}, "--max-total-tokens"),
        ({"schedule_conservativeness": 0}, "--schedule-conservativeness"),
        ({"json_model_override_args": "[]"}, "--json-model-override-args"),
        ({"logit_processors": '{"a": "b"}'}, "--logit-processors"),
        ({"logit_processors": '{"a": 1}'}, "--logit-processors"),
        ({"preferred_sampling_params": "{"}, "--preferred-sampling-params"),
        ({"chat_template": "/nowhere.jinja"}, "--chat-template"),
        ({"tokenizer_path": "/nowhere"}, "--tokenizer-path"),
        ({"model_path": ""}, "--model-path"),
    ],
)
def test_bad_values_are_one_clear_line(values: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError) as info:
        ServerArgs.from_kwargs(values)
    assert words in str(info.value)
    assert "\n" not in str(info.value)


def test_names_of_policies_are_those_that_exist() -> None:
    choices = {option.name: option.choices for option in options()}
    assert choices["schedule_policy"] == POLICIES
    assert choices["radix_eviction_policy"] == EVICTION_POLICIES


@pytest.mark.parametrize(("text", "seconds"), [("2.5", 2.5), ("30", 30.0), ("-1", None)])
def test_time_outs_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float | None) -> None:
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", text)
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", text)
    args = parse("--request-running-timeout", "7")
    assert (args.request_queue_timeout, args.request_running_timeout) == (seconds, 7.0)
    assert ServerArgs.from_kwargs({}).request_running_timeout == seconds


@pytest.mark.parametrize("text", ["soon", "0", "nan"])
def test_a_bad_time_out_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", text)
    with pytest.raises(StartError):
        ServerArgs.from_kwargs({})


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="'page_sise'; did you mean 'page_size'"):
        ServerArgs.from_kwargs({"page_sise": 1})


def test_chunking_can_be_switched_off() -> None:
    args = ServerArgs.from_kwargs({"chunked_prefill_size": -1})
    assert args.scheduler_config(IPC, "/m").chunked_prefill_size == -1


def test_configs_carry_the_options() -> None:
    args = ServerArgs.from_kwargs(
        {
            "dtype": "half",
            "page_size": 16,
            "stream_interval": 4,
            "preferred_sampling_params": '{"top_k": 5}',
            "disable_overlap_schedule": True,
        }
    )
    scheduler = args.scheduler_config(IPC, "/m")
    assert (scheduler.runner.dtype, scheduler.runner.page_size, scheduler.runner.model_path) == ("float16", 16, "/m")
    assert (scheduler.tokenizer_path, scheduler.runner.overlap) == ("/m", False)
    assert args.detokenizer_config(IPC, "/m").tokenizer_path == "/m"
    manager = args.tokenizer_manager_config(IPC, "/m")
    assert manager.preferred_sampling_params == '{"top_k": 5, "stream_interval": 4}'
    assert (manager.model_path, manager.served_model_name) == ("smollm2", "smollm2")


@pytest.mark.parametrize("name", ["scheduler_config", "detokenizer_config", "tokenizer_manager_config"])
def test_shared_fields_are_never_forgotten(name: str) -> None:
    """A config field that bears the name of an option has the option's value."""
    given = {
        "max_running_requests": 3,
        "chunked_prefill_size": 77,
        "max_prefill_tokens": 99,
        "schedule_policy": "lpm",
        "prefill_max_requests": 4,
        "enable_mixed_chunk": True,
        "prefill_decode_interval": 3,
        "shared_prefix_min": 5,
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": True,
        "default_priority_value": -2,
        "priority_scheduling_preemption_threshold": 6,
        "disable_priority_preemption": True,
        "abort_on_priority_when_disabled": True,
        "max_wait_steps": 100,
        "max_queued_requests": 0,
        "request_queue_timeout": 1.5,
        "request_running_timeout": 2.5,
        "radix_eviction_policy": "slru",
        "schedule_conservativeness": 0.7,
        "disable_radix_cache": True,
        "disable_overlap_schedule": False,
        "weight_version": "w",
        "decode_log_interval": 5,
        "strict": True,
        "log_level": "warning",
        "incremental_streaming_output": True,
        "allow_auto_truncate": True,
        "log_requests": True,
        "random_seed": 9,
        "max_total_tokens": 1234,
        "context_length": 55,
        "attention_backend": "b",
        "mem_fraction_static": 0.4,
        "json_model_override_args": '{"x": 1}',
        "load_format": "dummy",
        "device": "cpu",
    }
    args = ServerArgs.from_kwargs(given)
    config = getattr(args, name)(IPC, "/m")
    seen = {field: getattr(config, field) for field in config.__struct_fields__ if field in given}
    if name == "scheduler_config":
        seen |= {field: getattr(config.runner, field) for field in config.runner.__struct_fields__ if field in given}
        assert len(seen) > 15
    assert seen == {field: given[field] for field in seen}


def test_ray_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"pip install 'banyan-engine\[ray\]'"):
        launch(ServerArgs.from_kwargs({"use_ray": True}))
    with pytest.raises(StartError, match="does not go with --nnodes"):
        ServerArgs.from_kwargs({"use_ray": True, **NEEDS["nnodes"], "nnodes": 2})
