"""Faults on purpose: what fails, fails alone and is told; what can be made good again changes no output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from server import DEADLINE, Server, all_gone, events, running, until

PARAMS = {"max_new_tokens": 80, "temperature": 0, "ignore_eos": True}
PROMPTS = [f"the quick brown fox {number} jumps over" for number in range(8)]


@pytest.fixture(scope="module")
def expected(plain: Server) -> list[tuple[str, list[int]]]:
    """What a healthy server says."""
    return outputs(plain.generate(text=PROMPTS, sampling_params=PARAMS))


def outputs(answers: list[Any]) -> list[tuple[str, list[int]]]:
    return [(answer["text"], answer["output_ids"]) for answer in answers]


@pytest.mark.parametrize(
    "options", [["--page-size", "1"], ["--page-size", "16", "--disable-overlap-schedule", "--chunked-prefill-size", "16"]]
)
def test_retractions_and_failing_allocations_change_nothing(
    model: str, tmp_path: Any, expected: list[Any], options: list[str]
) -> None:
    faults = "retract_every=5,alloc_fail=0.1,detokenizer_delay=0.001"
    with running(model, tmp_path, *options, "--max-running-requests", "4", faults=faults) as server:
        for _ in range(2):  # cold and warm
            answers = server.generate(text=PROMPTS, sampling_params=PARAMS)
            assert outputs(answers) == expected
            assert all(0 <= item["meta_info"]["cached_tokens"] <= item["meta_info"]["prompt_tokens"] for item in answers)
        chunks = server.stream(text=PROMPTS, sampling_params=PARAMS, incremental=True)
        for index, (text, ids) in enumerate(expected):
            own = [chunk for chunk in chunks if chunk["index"] == index]
            assert "".join(chunk["text"] for chunk in own) == text
            assert [id for chunk in own for id in chunk["output_ids"]] == ids
        state = server.state()
        assert state["num_retracted"] > 20
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        assert "Traceback" not in server.text()


def test_a_pool_that_is_too_small_for_all(model: str, tmp_path: Any, expected: list[Any]) -> None:
    """Retraction without a fault; and a request that the pool can never hold is refused, not queued for ever."""
    options = ["--max-total-tokens", "256", "--page-size", "16", "--max-running-requests", "8"]
    with running(model, tmp_path, *options, "--schedule-conservativeness", "0.1") as server:
        for _ in range(3):
            assert outputs(server.generate(text=PROMPTS, sampling_params=PARAMS)) == expected
        assert server.state()["num_retracted"] > 0
        for stream in (False, True):
            reply = server.post({"input_ids": [5] * 300, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input_ids")
        answer = server.generate(input_ids=[5] * 200, sampling_params={"max_new_tokens": None, "ignore_eos": True})
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert answer["meta_info"]["completion_tokens"] == 39


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failing_step_fails_its_own_requests(start: Callable[..., Server], expected: list[Any], overlap: bool) -> None:
    options = ["--skip-server-warmup", "--max-running-requests", "2", *([] if overlap else ["--disable-overlap-schedule"])]
    server = start(*options, faults="step_fail=30")
    server.wait_ready()
    replies: dict[str, Any] = {}
    with httpx.stream("POST", server.url + "/generate", json=long_request(stream=True), timeout=DEADLINE) as reply:
        replies["stream"] = events(reply.iter_lines())
    last = replies["stream"][-1]["meta_info"]
    assert last["finish_reason"]["type"] == "abort"
    assert last["finish_reason"]["status_code"] == 500
    assert 20 < last["completion_tokens"] < 40
    assert outputs(server.generate(text=PROMPTS, sampling_params=PARAMS)) == expected
    server.check()
    assert server.text().count("Traceback") == 1
    server.terminate()


def test_a_failing_step_is_a_500_without_a_stream(start: Callable[..., Server], expected: list[Any]) -> None:
    server = start("--skip-server-warmup", faults="step_fail=10")
    server.wait_ready()
    reply = server.post(long_request(stream=False))
    assert reply.status_code == 500
    assert reply.json()["error"] == {
        "message": "The forward pass failed: IndexError.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert outputs(server.generate(text=PROMPTS, sampling_params=PARAMS)) == expected
    server.check()
    server.terminate()


def long_request(*, stream: bool) -> dict[str, Any]:
    return {"text": "a", "stream": stream, "sampling_params": PARAMS | {"max_new_tokens": 1000}}


def test_a_dying_detokenizer_is_told_to_streams_and_waiters(start: Callable[..., Server]) -> None:
    server = start("--restart-budget", "0", faults="detokenizer_die=40,detokenizer_delay=0.001")
    server.wait_ready()
    children, seen = server.children(), []
    with httpx.stream("POST", server.url + "/v1/completions", json=completion(), timeout=DEADLINE) as reply:
        assert reply.status_code == 200
        seen = events(reply.iter_lines())
    assert seen[-1]["error"]["type"] == "EngineDeadError"
    assert seen[-1]["error"]["code"] == 503
    assert server.process.wait(10) == 1
    assert all_gone(children)
    assert server.text().splitlines()[-1] == "banyan: error: the detokenizer process died: exited with status 70"
    assert server.directories() == []


def completion() -> dict[str, Any]:
    return {"prompt": "a", "stream": True, "max_tokens": 1000, "ignore_eos": True}


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_kill_is_told_to_whoever_waits(start: Callable[..., Server], victim: str) -> None:
    """A stream under way gets an error event, a client that waits for its first byte a 503."""
    server = start("--max-running-requests", "1", "--restart-budget", "0")
    server.wait_ready()
    children = server.children()
    body = long_request(stream=True) | {"incremental": True, "sampling_params": PARAMS | {"max_new_tokens": 3900}}
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=DEADLINE) as first:
        lines: Iterator[str] = first.iter_lines()
        next(lines)
        until(lambda: server.state()["num_running_reqs"] == 1)
        children[victim].suspend()  # so that nothing finishes before the kill
        waiting = httpx.Client(timeout=DEADLINE)
        with waiting.stream("GET", server.url + "/health") as reply:
            assert reply.status_code == 200
        children[victim].kill()
        seen = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert seen[-1]["error"] == {"message": "The engine has died.", "type": "EngineDeadError", "param": None, "code": 503}
    waiting.close()
    assert server.process.wait(10) == 1
    assert all_gone(children)
    assert server.text().splitlines()[-1].startswith(f"banyan: error: the {victim} process died: killed by SIGKILL")
    assert server.directories() == []


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("load_fail=1", "the scheduler failed to start: RuntimeError: BANYAN_FAULTS: load_fail"),
        ("detokenizer_die=1", "the detokenizer process died: exited with status 70"),
        ("step_fail=1", "The forward pass failed: IndexError."),
        ("typo=1", "failed to start: ValueError: BANYAN_FAULTS: unknown fault 'typo'"),
    ],
)
def test_a_fault_while_starting_ends_the_start(start: Callable[..., Server], faults: str, message: str) -> None:
    server = start(faults=faults)
    assert server.process.wait(DEADLINE) == 1
    last = server.text().splitlines()[-1]
    assert last.startswith("banyan: error: ")
    assert message in last
    assert server.directories() == []
