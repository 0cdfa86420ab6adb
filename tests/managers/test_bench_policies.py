"""The policy benchmark on tiny traces: every policy finishes, reproducibly, and shows what its traces are made to show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_policies as bench
import pytest
from marked_block import write_block
from policy_traces import TRACES

from banyan.managers.schedule_policy import POLICIES

NUM = 36
OPTIONS: dict[str, Any] = {"page_size": 1, "chunked_prefill_size": 64}


@pytest.fixture(scope="module")
def traces() -> list[Any]:
    whole = [make(0, 0.02) for make in TRACES.values()]
    return [
        replace(trace, conversations=[replace(item, max_new_tokens=6) for item in trace.conversations[:NUM]]) for trace in whole
    ]


@pytest.fixture(scope="module")
def results(traces: list[Any]) -> dict[str, dict[str, dict[str, float | None]]]:
    return bench.simulate(traces, [*POLICIES, bench.NO_CACHE], bench.StepCost(), OPTIONS)


def test_every_policy_runs_and_a_run_is_exact(traces: list[Any], results: dict[str, Any]) -> None:
    for trace in traces:
        assert set(results[trace.name]) == {*POLICIES, bench.NO_CACHE}
        asks = bench.Simulation(trace, "random", bench.StepCost(), OPTIONS).run()
        assert len(asks) == trace.num_requests
        assert all(len(ask.output) == ask.conversation.max_new_tokens and ask.end >= (ask.first or 0) for ask in asks)
        assert bench.summary(asks) == results[trace.name]["random"]


def test_the_cache_saves_what_it_must(results: dict[str, Any]) -> None:
    for by_policy in results.values():
        assert by_policy[bench.NO_CACHE]["reused"] == 0
    # 36 questions of which 6 compute their document; a document is four fifths of its prompts, so 0.66 is the most there is.
    assert max(results["rag"][name]["reused"] for name in ("lpm", "dfs-weight")) >= 0.6
    assert results["rag"]["lpm"]["reused"] > results["rag"]["fcfs"]["reused"]
    assert all(values["reused"] == 0 for values in results["random"].values())


def test_the_clock_of_a_run_is_the_sum_of_its_steps() -> None:
    trace = TRACES["random"](1, 0.02)
    asks = bench.Simulation(trace, "fcfs", bench.StepCost(step=1.0, prompt_token=0, decode_row=0, context_token=0), OPTIONS).run()
    first = min(asks, key=lambda ask: ask.arrived)
    assert first.ttft == pytest.approx(-(-len(first.prompt) // 64))
    spans = [ask.end - (ask.first or 0) for ask in asks]
    assert min(spans) >= min(ask.conversation.max_new_tokens for ask in asks) - 1, "one token per step at most"


def test_tables_go_between_the_marks(tmp_path: Path, results: dict[str, Any]) -> None:
    page = tmp_path / "page.md"
    begin, end = f"<!-- {bench.BLOCK}: begin -->", f"<!-- {bench.BLOCK}: end -->"
    page.write_text(f"above\n{begin}\nold\n{end}\nbelow\n")
    text = bench.table(results)
    write_block(page, bench.BLOCK, text)
    write_block(page, bench.BLOCK, text)
    assert page.read_text() == f"above\n{begin}\n\n{text}\n{end}\nbelow\n"
    assert text.count("| rag |") == len(POLICIES) + 1
    assert "by turn on the chat trace" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no block"):
        write_block(page, bench.BLOCK, text)
