"""The benchmarks count right, time right and keep failures; their own speed numbers are never looked at."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import bench_offline
import bench_serving
import bench_step
import numpy as np
import pytest
import report
import server_process
import serving_report
import workloads
from harness import CONFIG
from http_load import NOT_SENT, Backend, Client, NativeBackend, OpenAIBackend, Reply, Run, events, run_sessions
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_folder

import banyan

SCRIPTS = Path(banyan.__file__).parent / "benchmarks"
ORACLE = ["--load-format", "oracle"]
ONE_BY_ONE = ["--max-concurrency", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = byte_level_folder(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(scope="module")
def url(model: str) -> Iterator[str]:
    with server_process.running_server(model, ORACLE, start_timeout=60) as url:
        yield url


def serve_load(url: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """(exit status, results)."""
    path = folder / "result.json"
    status = bench_serving.main(["--base-url", url, "--json", str(path), *options])
    return status, json.loads(path.read_text())["results"]


# --- a server and its load --------------------------------------------------------------------------------------------------------


def test_the_command_starts_a_server_and_prints_one_table(model: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPTS / "bench_serving.py"), "--model-path", model, "--num-prompts", "5", "--input-len", "10",
               "--output-len", "4", "--json", str(path), "--", *ORACLE, "--page-size", "4"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    head, table = done.stdout.split("\n\n")
    assert [line.split(":")[0] for line in head.splitlines()] == ["command", "commit", "machine", "versions", "setting"]
    assert all(line.startswith("| ") or set(line) <= set("|-:") for line in table.splitlines())
    assert "page_size 4" in head and "--page-size 4" in head
    result = json.loads(path.read_text())
    assert result["environment"]["versions"]["banyan"] == banyan.__version__
    assert result["server"]["scheduler_info"]["page_size"] == 4
    results = result["results"]
    assert (results["completed"], results["failed"], results["short_outputs"]) == (5, 0, 0)
    assert (results["input_tokens"], results["output_tokens"], results["cached_tokens"]) == (50, 20, 0)
    assert results["output_throughput"] == pytest.approx(20 / results["duration_s"])
    assert set(results["ttft_ms"]) == {"mean", "p50", "p90", "p99"}


@pytest.mark.parametrize("backend", ["native", "openai"])
@pytest.mark.parametrize(
    ("options", "completed", "inputs", "cached"),
    [
        (["--workload", "random", "--num-prompts", "4"], 4, 4 * 8, 0),
        (["--workload", "shared-prefix", "--groups", "2", "--prompts-per-group", "3", "--shared-len", "40"], 6, 6 * 48, 2 * 2 * 40),
        # the last token of an output is never computed, so the next turn finds one less than was said
        (["--workload", "multi-turn", "--conversations", "2", "--turns", "3"], 6, 2 * (8 + 20 + 32), 2 * (11 + 23)),
    ],
    ids=["random", "shared-prefix", "multi-turn"],
)
def test_workloads(url: str, tmp_path: Path, backend: str, options: list[str], completed: int, inputs: int, cached: int) -> None:
    lengths = ["--input-len", "8", "--output-len", "4", "--seed", "1"]
    status, results = serve_load(url, tmp_path, "--backend", backend, *options, *lengths, *ONE_BY_ONE)
    assert status == 0
    assert (results["completed"], results["failed"], results["short_outputs"]) == (completed, 0, 0)
    assert (results["input_tokens"], results["output_tokens"], results["cached_tokens"]) == (inputs, 4 * completed, cached)
    assert results["hit_rate_percent"] == pytest.approx(100 * cached / inputs)
    assert results["max_start_lag_ms"] is None


def test_the_cache_is_flushed_unless_told_not_to(url: str, tmp_path: Path) -> None:
    options = ["--num-prompts", "3", "--input-len", "9", "--output-len", "1"]
    for _ in range(2):
        assert serve_load(url, tmp_path, *options)[1]["cached_tokens"] == 0
    assert serve_load(url, tmp_path, *options, "--no-flush")[1]["cached_tokens"] == 3 * 8


def test_open_loop(url: str, tmp_path: Path) -> None:
    status, results = serve_load(url, tmp_path, "--num-prompts", "6", "--output-len", "3-5", "--request-rate", "200")
    assert status == 0
    assert results["completed"] == 6
    assert 18 <= results["output_tokens"] <= 30
    assert results["max_start_lag_ms"] >= 0


def test_nothing_completed_is_a_failure(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = serve_load(url, tmp_path, "--num-prompts", "3", "--input-len", "5000")
    assert status == 1
    assert (results["completed"], results["failed"], results["ttft_ms"]) == (0, 3, None)
    assert list(results["errors"].values()) == [3]
    assert next(iter(results["errors"])).startswith("HTTP 400 ")
    assert "failed: HTTP 400 " in capsys.readouterr().err


def test_a_failed_turn_fails_the_turns_after_it(url: str, tmp_path: Path) -> None:
    options = ["--workload", "multi-turn", "--conversations", "2", "--turns", "4", "--input-len", "3000", "--output-len", "1"]
    status, results = serve_load(url, tmp_path, *options)
    assert status == 0
    assert (results["completed"], results["failed"]) == (2, 6)
    assert results["errors"].pop(NOT_SENT) == 4
    assert list(results["errors"].values()) == [2]


def test_a_server_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_serving.main(["--model-path", str(tmp_path / "nothing")]) == 1
    assert "banyan: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--base-url", "http://x", "--", "--page-size", "4"],
        ["--base-url", "http://x", "--model-path", "smollm2"],
        ["--turns", "3"],
        ["--input-len", "9-8"],
        ["--num-prompts", "0"],
        ["--request-rate", "0"],
        ["--header", "x"],
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_serving.parse(options)
    assert stop.value.code == 2


# --- a server that misbehaves -----------------------------------------------------------------------------------------------------


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that answers everything with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def ask(url: str, backend: Backend, *, timeout: float = 60) -> Reply:
    async def send() -> Reply:
        client = Client(url, backend, headers={}, timeout=timeout)
        try:
            return await client.send([1, 2], 4)
        finally:
            await client.close()

    return asyncio.run(send())


def stream(*chunks: Any, done: bool = True, newline: str = "\n") -> bytes:
    texts = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks] + ["[DONE]"] * done
    return "".join(f"data: {text}{newline}{newline}" for text in texts).encode()


def native(ids: list[int], total: int, reason: dict[str, Any] | None = None) -> dict[str, Any]:
    meta = {"prompt_tokens": 2, "completion_tokens": total, "cached_tokens": 1, "finish_reason": reason}
    return {"text": "x", "output_ids": ids, "meta_info": meta}


LENGTH = {"type": "length", "length": 4}
NATIVE = NativeBackend(ignore_eos=True)
OPENAI = OpenAIBackend(model="m", ignore_eos=True, needs_ids=False)


@pytest.mark.parametrize(
    ("backend", "status", "body", "kind"),
    [
        (NATIVE, 503, b'{"error": {"message": "draining", "type": "ServiceUnavailableError"}}', "HTTP 503 ServiceUnavailableError"),
        (OPENAI, 400, b'{"object": "error", "message": "no", "type": "BadRequestError"}', "HTTP 400 BadRequestError"),
        (NATIVE, 502, b"<html>", "HTTP 502"),
        (NATIVE, 500, b"[]", "HTTP 500"),
        (NATIVE, 200, stream(native([5], 1), done=False), "stream ended without [DONE]"),
        (
            NATIVE,
            200,
            stream(native([5], 1), {"error": {"code": 503, "type": "Dead", "message": "m"}}, done=False),
            "error 503 Dead",
        ),
        (NATIVE, 200, stream(native([5], 1), native([], 1, {"type": "abort", "message": "m"})), "aborted by the server"),
        (OPENAI, 200, stream({"choices": [{"text": "a", "finish_reason": "abort"}]}), "aborted by the server"),
        (OPENAI, 200, stream({"error": "boom"}), "error"),
        (NATIVE, 200, stream({}), "unknown error"),
        (NATIVE, 200, stream("{"), "unreadable event"),
        (OPENAI, 200, stream({"choices": 3}), "unreadable event"),
        (OPENAI, 200, stream({"choices": [{"text": "", "finish_reason": "stop"}]}), "no tokens"),
    ],
)
def test_failures_are_kept_by_kind(backend: Backend, status: int, body: bytes, kind: str) -> None:
    with answering(status, body) as url:
        reply = ask(url, backend)
    assert reply.error == kind
    assert reply.end >= reply.start > 0


def test_no_server_and_a_silent_server() -> None:
    with answering(200, b"") as url:
        pass
    assert ask(url, NATIVE).error == "ConnectError"

    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made and never read
        reply = ask(f"http://127.0.0.1:{silent.getsockname()[1]}", NATIVE, timeout=0.1)
    assert reply.error in ("timeout", "ReadTimeout")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("cumulative", [False, True])
def test_native_stream(newline: str, cumulative: bool) -> None:
    ids = [[5], [5, 6, 7], [5, 6, 7, 8]] if cumulative else [[5], [6, 7], [8]]
    chunks = [native(ids[0], 1), native(ids[1], 3), native(ids[2], 4), native([5, 6, 7, 8] if cumulative else [], 4, LENGTH)]
    with answering(200, stream(*chunks, newline=newline)) as url:
        reply = ask(url, NATIVE)
    assert reply.error is None
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens, reply.first_tokens) == (2, 4, 1, 1)
    assert reply.output_ids == [5, 6, 7, 8]
    assert len(reply.token_times) == 3, "the last chunk carries no token"


@pytest.mark.parametrize("with_usage", [False, True])
def test_openai_stream(with_usage: bool) -> None:
    chunks: list[Any] = [{"choices": [{"text": text}], "usage": None} for text in ("", "a", "b")]
    chunks.append({"choices": [{"text": "", "finish_reason": "length"}]})
    if with_usage:
        chunks.append({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4, "prompt_tokens_details": None}})
    with answering(200, stream(*chunks)) as url:
        reply = ask(url, OPENAI)
    assert reply.error is None
    assert len(reply.token_times) == 2
    assert (reply.output_tokens, reply.counted, reply.cached_tokens) == ((4, True, None) if with_usage else (2, False, None))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary().map(lambda data: data.hex().encode()), max_size=5), st.lists(st.integers(0, 200)))
def test_events_however_the_bytes_are_cut(texts: list[bytes], cuts: list[int]) -> None:
    body = b"".join(b"data: " + text + b"\r\n\r\n" for text in texts)
    bounds = sorted({0, len(body), *(min(cut, len(body)) for cut in cuts)})

    async def pieces() -> AsyncIterator[bytes]:
        for begin, end in itertools.pairwise(bounds):
            yield body[begin:end]

    async def read() -> list[bytes]:
        return [event async for _, event in events(pieces())]

    assert asyncio.run(read()) == texts


# --- numbers ----------------------------------------------------------------------------------------------------------------------


def test_latencies_are_what_they_are_called() -> None:
    reply = Reply(wanted=7, start=10.0, end=10.9, token_times=[10.1, 10.2, 10.6], first_tokens=2, output_tokens=7)
    single = Reply(wanted=1, start=20.0, end=20.3, token_times=[20.2], output_tokens=1)
    found = serving_report.latencies([reply, single])
    assert found["ttft_ms"] == pytest.approx([100, 200])
    assert found["itl_ms"] == pytest.approx([100, 400])
    assert found["tpot_ms"] == pytest.approx([100]), "500 ms for the 5 tokens after the first chunk; no value for one token"
    assert found["e2e_ms"] == pytest.approx([900, 300])


def test_summary_counts_failures_and_leaves_them_out_of_the_rates() -> None:
    good = Reply(wanted=4, start=0, end=1, token_times=[0.5, 1.0], prompt_tokens=10, output_tokens=3, cached_tokens=5)
    bad = Reply(wanted=4, start=0, end=2, token_times=[0.1], prompt_tokens=10, output_tokens=1, error="timeout", message="why")
    summary = serving_report.summarize(Run([good, bad], duration=2.0, late=0.25, client_cpu=1.0))
    assert (summary["completed"], summary["failed"], summary["short_outputs"]) == (1, 1, 1)
    assert (summary["errors"], summary["error_examples"]) == ({"timeout": 1}, {"timeout": "why"})
    assert (summary["request_throughput"], summary["input_throughput"], summary["output_throughput"]) == (0.5, 5.0, 1.5)
    assert (summary["hit_rate_percent"], summary["tokens_per_chunk"], summary["max_start_lag_ms"]) == (50.0, 1.5, 250.0)
    assert summary["ttft_ms"] == pytest.approx({"mean": 500, "p50": 500, "p90": 500, "p99": 500})
    assert ["  timeout", "1", "", "", ""] in serving_report.rows(summary)
    unknown = serving_report.summarize(Run([Reply(wanted=1, token_times=[1.0], output_tokens=1, counted=False)], 1.0, None, 0.0))
    assert unknown["cached_tokens"] is None
    assert any("chunks counted" in row[0] for row in serving_report.rows(unknown))


def test_spread() -> None:
    assert report.spread([]) is None
    assert report.spread(list(range(101))) == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})


def test_environment_tells_the_machine_the_commit_and_the_command() -> None:
    facts = report.environment()
    assert facts["machine"]["cpu"] and facts["machine"]["memory_gib"] > 0 and facts["machine"]["usable_cpus"] >= 1
    assert facts["commit"]
    assert facts["command"].startswith("python ")
    assert {"python", "banyan", "torch", "transformers"} <= set(facts["versions"])
    assert len(report.environment_lines(facts)) == 4


@pytest.mark.parametrize("workload", list(workloads.OPTIONS))
def test_workloads_depend_on_the_seed_alone(workload: str) -> None:
    def make(seed: int) -> list[workloads.Session]:
        args, _ = bench_serving.parse(["--workload", workload, "--seed", str(seed), "--input-len", "3-9", "--output-len", "2-5"])
        return workloads.build(args, 512)

    assert make(3) == make(3) != make(4)
    turns = [turn for session in make(3) for turn in session]
    assert {turn.output_len for turn in turns} == {2, 3, 4, 5}
    assert all(0 <= id < 512 for turn in turns for id in turn.input_ids)


def test_arrivals() -> None:
    assert not workloads.arrivals(5, None, 0).any()
    times = workloads.arrivals(4001, 8.0, 7)
    assert (times == workloads.arrivals(4001, 8.0, 7)).all()
    assert times[0] == 0
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.1), "exponential: deviation equals mean"


def test_concurrency_is_reached_and_never_exceeded() -> None:
    class Counting:
        now = most = 0

        async def send(self, input_ids: list[int], output_len: int) -> Reply:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return Reply(wanted=output_len, start=1.0, end=2.0)

    client: Any = Counting()
    sessions = [[workloads.Turn([1], 1)] * 2 for _ in range(20)]
    run = asyncio.run(run_sessions(client, sessions, np.zeros(20), max_concurrency=3, needs_ids=False))
    assert (client.most, len(run.replies), run.duration) == (3, 40, 1.0)


# --- without a server -------------------------------------------------------------------------------------------------------------


def test_offline(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    options = ["--model-path", model, "--repeats", "2", "--num-prompts", "3", "--input-len", "8", "--output-len", "4"]
    assert bench_offline.main([*options, "--json", str(path), "--", *ORACLE]) == 0
    assert "| output tokens/s" in capsys.readouterr().out
    runs = json.loads(path.read_text())["runs"]
    assert [(run["input_tokens"], run["output_tokens"], run["cached_tokens"]) for run in runs] == [(24, 12, 0)] * 2


def step(folder: Path, *options: str) -> dict[str, Any]:
    path = folder / "result.json"
    assert bench_step.main([*options, "--repeats", "2", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_step_computes_what_transformers_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=128, initializer_range=0.5)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    options = ["--model-path", str(tmp_path / "model"), "--dtype", "float32", "--prefill", "1x9,2x9", "--decode", "2x9,3x7"]
    found = step(tmp_path, *options, "--decode-steps", "5", "--reference-max-batch", "2")
    assert [each["case"] for each in found["results"]] == ["prefill 1 x 9", "prefill 2 x 9", "decode 2 x 9", "decode 3 x 7"]
    assert [(each.get("same_tokens"), each.get("num_tokens")) for each in found["results"]] == [
        (1, 1),
        (2, 2),
        (12, 12),
        (None, None),
    ]
    for each in found["results"]:
        assert all(len(values) == 2 and min(values) > 0 for values in each["values"].values())
    prefill, _, decode, alone = found["results"]
    assert prefill["ratio"] == pytest.approx(np.median(prefill["values"]["banyan"]) / np.median(prefill["values"]["transformers"]))
    assert decode["ratio"] == pytest.approx(np.median(decode["values"]["transformers"]) / np.median(decode["values"]["banyan"]))
    assert set(alone["values"]) == {"banyan"}
    assert all(mib > 0 for mib in found["rss_mib"].values())
    assert "| decode 2 x 9" in capsys.readouterr().out


def test_step_over_the_oracle_reads_the_right_slots(model: str, tmp_path: Path) -> None:
    """A decode's context is computed once and read by every repeat: its tokens must be those of a fresh sequence."""
    bench = bench_step.EngineSide(
        bench_step.RunnerConfig(model_path=model, load_format="oracle", max_total_tokens=64, overlap=False),
        [bench_step.Case("decode", 3, 6)],
        decode_steps=4,
    )
    prompts = np.random.default_rng(0).integers(0, 500, (3, 6))
    run = bench_step._engine_run(bench_step.Case("decode", 3, 6), bench, prompts, 4)
    (_, first), (_, second) = run(), run()
    assert first.shape == (3, 5)
    assert (first == second).all()
    longer = np.concatenate([prompts, first[:, :-1]], axis=1)
    bench.place(3, 10, 10)
    assert (bench.extend(longer) == first[:, -1]).all()
    bench.runner.close()


def test_step_refuses_what_it_cannot_measure(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--load-format", "oracle"], ["--prefill", "", "--decode", ""], ["--prefill", "128"]):
        with pytest.raises(SystemExit):
            bench_step.main(["--model-path", model, *options])
    too_long = ["--model-path", model, "--load-format", "oracle", "--no-reference", "--prefill", "1x5000", "--decode", ""]
    assert bench_step.main(too_long) == 1
    assert "the model has 4096" in capsys.readouterr().err


@pytest.mark.model
def test_step_of_a_gguf_file(tmp_path: Path) -> None:
    options = ["--model-path", "smollm2", "--dtype", "float32", "--prefill", "1x12", "--decode", "1x12", "--decode-steps", "2"]
    found = step(tmp_path, *options)
    assert [each["same_tokens"] for each in found["results"]] == [1, 3]
