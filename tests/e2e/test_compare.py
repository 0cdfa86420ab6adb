"""The comparison of engines: its loads over a real server, the wire of engines without one, its table."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import compare
import compare_workloads
import pytest
from compare_results import FAILED, SAME_IDS, START, START_FIGURE, Measured, in_order, notes, read_results, rows, write_results
from compare_workloads import WORKLOADS, Figures, Source, WorkloadFailed, warm_up
from http_load import Client, LlamaBackend, NativeBackend, Reply
from peers import Models, Peer
from server import Server

BENCHMARKS = Path(compare.__file__).parent


def run(url: str, name: str) -> Figures:
    async def body() -> Figures:
        client = Client(url, NativeBackend(ignore_eos=True), headers={}, timeout=60)
        try:
            await warm_up(client, Source(1, 200))
            return await WORKLOADS[name](client, Source(0, 200))
        finally:
            await client.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("W1", ["W1 time per token", "W1 time to first token"]),
        ("W4", ["W4 total", "W4 first token, turn 1", "W4 first token, turn 5"]),
        ("W5", ["W5 worst gap", "W5 first token of the prompt"]),
    ],
)
def test_loads(plain: Server, monkeypatch: pytest.MonkeyPatch, name: str, figures: list[str]) -> None:
    monkeypatch.setattr(compare_workloads, "LONG_PROMPT", 2048)
    found = run(plain.url, name)
    assert list(found.seconds) == figures
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert [len(ids) for ids in found.outputs] == ([128] * 3 if name == "W1" else [])


def test_a_load_that_fails_has_no_numbers(narrow: Server) -> None:
    with pytest.raises(WorkloadFailed, match="400"):
        run(narrow.url, "W3")  # its prompts are longer than the context


ENGINE = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from peer_wire import serve

port, *modes = sys.argv[1:]

class Counting:
    # Each step gives every request its next number; the prompts' lengths tell the requests apart.
    def __init__(self):
        self.live = {{}}
        self.most = 0

    def add(self, number, input_ids, max_new_tokens):
        self.live[number] = [len(input_ids), max_new_tokens]
        self.most = max(self.most, len(self.live))
        if "dies" in modes and self.most > 8:
            print("too many at once", flush=True)
            os._exit(3)

    def step(self):
        time.sleep(0.5 if "slow" in modes and self.most > 8 else 0)
        for number, left in list(self.live.items()):
            left[0], left[1] = left[0] + 1, left[1] - 1
            if not left[1]:
                del self.live[number]
            yield number, [left[0]], not left[1]

    def busy(self):
        return bool(self.live)

if "idle" in modes and "--at-all" not in modes:
    time.sleep(600)
if "broken" in modes:
    sys.exit("cannot start here")
serve(Counting(), int(port))
"""


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., compare.EngineRun]:
    """Factory of runs of an engine that counts, which has the modes of its script."""
    script = tmp_path / "engine.py"
    script.write_text(textwrap.dedent(ENGINE))

    def make(*modes: str, workloads: tuple[str, ...], fallback: tuple[str, ...] = (), **limits: float) -> compare.EngineRun:
        def command(python: Path, models: Models, precision: str, port: int) -> list[str]:
            return [str(python), str(script), str(port), *modes]

        peer = Peer("fake", (), command, lambda: NativeBackend(ignore_eos=True), "/health", frozenset({"bf16"}), {}, fallback)
        bench = compare.Bench(
            models=Models("", tmp_path, {}),
            root=tmp_path,
            precision="bf16",
            workloads=workloads,
            limits=compare.Limits(**{"start": 60.0, "load": 60.0, "repeat": 60.0, **limits}),
            seed=0,
            vocab_size=200,
            run="now",
        )
        return compare.EngineRun(peer, bench)

    return make


def test_an_engine_without_a_server(engine: Callable[..., compare.EngineRun]) -> None:
    run = engine(workloads=("W1", "W2", "W4"))  # W2: as many connections at once as a small backlog refuses
    run.measure()
    run.measure()
    assert run.found["W1"].outputs == [list(range(129, 257))] * 3
    assert {name: len(values) for load in run.found.values() for name, values in load.figures.items()} == {
        START_FIGURE: 2,
        **dict.fromkeys([*(figure for load in ("W1", "W2", "W4") for figure in compare_workloads.FIGURES[load])], 2),
    }
    assert all(load.failure is None and load.peak > 1e6 and load.run == "now" for load in run.found.values())


def test_an_engine_that_ends_is_started_again(engine: Callable[..., compare.EngineRun]) -> None:
    """What it ended in has no numbers, and is not tried again; what comes after has some."""
    run = engine("dies", workloads=("W1", "W2", "W4"))
    run.measure()
    assert run.found["W2"].failure == "its process ended with status 3\ntoo many at once"
    assert not run.found["W2"].figures
    run.measure()
    assert [len(run.found[load].figures[f"{load} {what}"]) for load, what in (("W1", "time per token"), ("W4", "total"))] == [2, 2]
    assert len(run.found[START].figures[START_FIGURE]) == 3


def test_a_load_that_takes_too_long(engine: Callable[..., compare.EngineRun]) -> None:
    run = engine("slow", workloads=("W2",), load=5.0)
    run.measure()
    run.measure()
    assert run.found["W2"].failure == "given up after 5 s"
    assert len(run.found[START].figures[START_FIGURE]) == 1  # there was nothing to start it again for


def test_a_long_load_is_not_repeated(engine: Callable[..., compare.EngineRun]) -> None:
    run = engine(workloads=("W1",), repeat=0.0)
    run.measure()
    run.measure()
    assert len(run.found["W1"].figures["W1 time per token"]) == 1


def test_an_engine_that_does_not_start(engine: Callable[..., compare.EngineRun]) -> None:
    run = engine("broken", workloads=("W1",))
    run.measure()
    assert list(run.found) == [START]
    assert run.found[START].failure == "ended with status 1 instead of starting\ncannot start here"
    other = engine("idle", workloads=("W1",), fallback=("--at-all",), start=2.0)
    other.measure()
    assert other.found[START].note == "with --at-all, since with its defaults it did not start in 2 s"
    assert other.found[START].failure is None and other.found["W1"].figures


def test_events_of_llama_cpp() -> None:
    backend, reply = LlamaBackend(), Reply(wanted=2)
    backend.read(b'{"content":"a","tokens":[5],"stop":false}', 1.0, reply)
    backend.read(b'{"content":"b","tokens":[6],"stop":false}', 2.0, reply)
    backend.read(b'{"content":"","tokens":[],"stop":true,"tokens_predicted":2,"tokens_evaluated":7}', 3.0, reply)
    assert (reply.output_ids, reply.token_times, reply.end) == ([5, 6], [1.0, 2.0], 3.0)
    assert (reply.prompt_tokens, reply.output_tokens) == (7, 2)


def results() -> dict[str, dict[str, Measured]]:
    ours = {
        START: Measured({START_FIGURE: [3.0]}, peak=1e9, run="b"),
        "W1": Measured({"W1 time per token": [0.010, 0.012]}, [[1, 2, 3, 4]], peak=2e9, run="a"),
        "W2": Measured({"W2 total": [5.0]}, run="b"),
    }
    other = {"W1": Measured({"W1 time per token": [0.020, 0.022]}, [[1, 2, 9, 4]], run="a")}
    third = {
        START: Measured({START_FIGURE: [9.0]}, note="with less", run="b"),
        "W1": Measured({"W1 time per token": [0.030]}, run="b"),
        "W2": Measured(failure=f"ended\nwhere\n{Path.home()}/x: no", run="b"),
    }
    return in_order({"c": third, "b": other, "banyan": ours, "gone": {}}, ["banyan", "b", "gone", "c"])


def test_the_table() -> None:
    assert rows(results(), "bf16") == [
        ["start to first token, s", "3.00", "-", "9.00", "0.33", "-"],
        ["peak memory, GB", "2.00", "-", "-", "-", "-"],
        ["W1 time per token, ms", "11.00 (10.00-12.00)", "21.00 (20.00-22.00)", "30.00", "0.52", "0.80"],
        ["W2 total, s", "5.00", "-", FAILED, "-", "0.85"],
        [SAME_IDS, "4", "2", "-", "-", "-"],
    ]
    assert notes(results()) == [
        "c: with less",
        "c, W2: ended ... ~/x: no",
        "a: banyan W1; b W1",
        "b: banyan W2; c W1 W2",
    ]


def test_results_add_up(tmp_path: Path) -> None:
    """What is kept comes back, and a table can be printed and written without measuring."""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- compare-int4: begin -->\nold\n<!-- compare-int4: end -->\nz\n")
    kept = tmp_path / "results-smollm2-int4-0.json"
    assert read_results(kept) == {}
    write_results(kept, {"banyan": results()["banyan"]})
    found = tmp_path / "all.json"
    assert (
        compare.main(["--rounds", "0", "--precision", "int4", "--root", str(tmp_path), "--write", str(page), "--json", str(found)])
        == 0
    )
    text = page.read_text()
    assert "old" not in text and "| W2 total, s " in text and "b: banyan W2" in text and text.endswith("z\n")
    assert json.loads(found.read_text())["result"]["banyan"]["W2"]["figures"] == {"W2 total": [5.0]}


def test_engines_that_lack_a_precision_are_left_out() -> None:
    assert "vllm" in compare.parse([]).engines
    assert "vllm" not in compare.parse(["--precision", "int4"]).engines
    with pytest.raises(SystemExit):
        compare.parse(["--engines", "nobody"])
